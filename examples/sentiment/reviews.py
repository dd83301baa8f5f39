"""Readers of three corpora of labelled texts, each split into a train, a held-out and a test part.

The corpora are read in the layouts in which they are published:

* IMDb (Maas et al., 2011): `aclImdb/{train,test}/{pos,neg}/ID_STARS.txt`, a folder or a tar archive of it.
* rt-polarity (Pang and Lee, 2005): `rt-polarity.{pos,neg}`, one film review a line.
* chABSA (TIS Inc., 2018): `e*_ann.json`, Japanese annual reports with opinions marked in their sentences.
"""

from __future__ import annotations

import json
import lzma
import random
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ..training import InputError

LABELS = ("negative", "positive")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Review:
    """A text with its label, an index into `LABELS` (None: not known), and its name in the corpus."""

    name: str
    text: str
    label: int | None


@dataclass(frozen=True, slots=True)
class Corpus:
    """The parts of a corpus: for training, for the choice of the best epoch, and for the test."""

    train: list[Review]
    held_out: list[Review]
    test: list[Review]

    def find(self, name: str) -> Review:
        """The review of that name, in any part.

        Raises:
            InputError: there is none.
        """
        for review in (*self.test, *self.held_out, *self.train):
            if review.name == name:
                return review
        some = ", ".join(review.name for review in self.test[:3])
        raise InputError(f"review must be the name of one in the data, such as {some}; got {name!r}")


def load(corpus: str, path: Path, seed: int = 0) -> Corpus:
    """The corpus of that name, read from `path`.

    Args:
        corpus: a key of `CORPORA`.
        path: IMDb: the folder above `train` and `test`, or a tar archive; rt-polarity and chABSA: the folder of their
            files.
        seed: seed of the choice of the held-out part, and of the test part of a corpus that has none of its own.

    Raises:
        InputError: something is missing, damaged, or not of that corpus.
    """
    if not path.exists():
        raise InputError(f"data must be a file or a folder, got {path}, which does not exist")
    parts = CORPORA[corpus](path, random.Random(seed))
    for name in ("train", "held_out", "test"):
        if not getattr(parts, name):
            raise InputError(f"data must hold reviews of the corpus {corpus} for each part, got none to {name}: {path}")
    return parts


def imdb(path: Path, rng: random.Random) -> Corpus:
    """IMDb's own train and test parts; a tenth of the first is held out."""
    parts: dict[str, list[Review]] = {"train": [], "test": []}
    in_folder = ((file.relative_to(path).as_posix(), file.read_bytes()) for file in path.rglob("*.txt"))
    for file, data in in_folder if path.is_dir() else _archive_files(path):
        *_, part, folder, _ = ("", "", *PurePosixPath(file).parts)
        if part in parts and folder in ("neg", "pos") and file.endswith(".txt"):
            name = "/".join(PurePosixPath(file).parts[-3:])
            # The reviews have their line breaks as HTML, and nothing else.
            parts[part].append(Review(name, _decode(data, file).replace("<br />", "\n"), int(folder == "pos")))
    for reviews in parts.values():
        reviews.sort(key=lambda review: review.name)
    return Corpus(*_cut(parts["train"], rng, 0.9), parts["test"])


def _archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive of any compression, read once from front to back: nothing is written to disk."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"data must be a folder or a whole tar archive, got {path}: {error}") from error


def rt_polarity(path: Path, rng: random.Random) -> Corpus:
    """A tenth of the lines is held out, a tenth tested."""
    reviews = []
    for suffix, label in (("neg", 0), ("pos", 1)):
        file = path / f"rt-polarity.{suffix}"
        if not file.is_file():
            raise InputError(f"data must be a folder with rt-polarity.neg and rt-polarity.pos, got {path}")
        lines = file.read_text(encoding="iso-8859-1").split("\n")  # byte 85, an ellipsis to some, ends no line
        reviews += [
            Review(f"{file.name}:{number}", line.strip(), label) for number, line in enumerate(lines, 1) if line.strip()
        ]
    train, rest = _cut(reviews, rng, 0.8)
    return Corpus(train, *_cut(rest, rng, 0.5))


def chabsa(path: Path, rng: random.Random) -> Corpus:
    """Sentences with their polarity: a tenth of the reports is held out, two tenths tested.

    A sentence is positive if more of its opinions are positive than negative, and negative if fewer are. One without
    opinions, with as many of each, or with neutral ones only has no polarity and is left out. The parts are of whole
    reports, since the sentences of one resemble each other.
    """
    reports = [_report(file) for file in sorted(path.glob("*_ann.json"))]
    train, rest = _cut(reports, rng, 0.7)
    held_out, test = _cut(rest, rng, 1 / 3)
    return Corpus(*([review for report in part for review in report] for part in (train, held_out, test)))


def _report(file: Path) -> list[Review]:
    """The sentences of a report that have a polarity."""
    try:
        report = json.loads(_decode(file.read_bytes(), file.name))
        reviews = []
        for sentence in report["sentences"]:
            polarities = [opinion["polarity"] for opinion in sentence["opinions"]]
            balance = polarities.count("positive") - polarities.count("negative")
            if balance:
                name = f"{file.name}:{sentence['sentence_id']}"
                reviews.append(Review(name, sentence["sentence"], int(balance > 0)))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"data must be annotated sentences in JSON as in chABSA, got {file}: {error!r}") from error
    return reviews


CORPORA: dict[str, Callable[[Path, random.Random], Corpus]] = {
    "imdb": imdb,
    "rt-polarity": rt_polarity,
    "chabsa": chabsa,
}


def _cut(items: list[Item], rng: random.Random, share: float) -> tuple[list[Item], list[Item]]:
    """The items in random order, cut after that share of them, with at least one on either side where there are two."""
    shuffled = rng.sample(items, len(items))
    cut = min(max(round(share * len(items)), 1), max(len(items) - 1, 0))
    return shuffled[:cut], shuffled[cut:]


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"data must be UTF-8, got {name}: {error}") from error


def majority(reviews: Iterable[Review]) -> float:
    """The accuracy of always predicting the most frequent label."""
    labels = [review.label for review in reviews]
    return max(labels.count(label) for label in range(len(LABELS))) / len(labels)
