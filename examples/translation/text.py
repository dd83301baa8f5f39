"""Text to token ids and back: parallel files, vocabularies of words, and joint byte-pair encoding."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ..training import InputError

SPECIAL = ("<pad>", "<unk>", "<sos>", "<eos>")
PAD, UNK, SOS, EOS = range(len(SPECIAL))


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, without their ends.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} must be a file that can be read, got {error}") from error
    if not content:
        raise InputError(f"{path} must have at least one line, got an empty file")
    return lines_of(content, str(path))


def lines_of(content: bytes, name: str) -> list[str]:
    """The lines of UTF-8 text, which end with a line feed or with CR LF; `name` is for the error.

    Raises:
        InputError: the text is not UTF-8.
    """
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} must be text in UTF-8, got {error}") from error
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_parallel(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """The pairs of lines of two files.

    Raises:
        InputError: one cannot be read, or they have different numbers of lines.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(
            f"{target} must have {len(sources)} lines like {source}, one for each sentence, got {len(targets)}"
        )
    return list(zip(sources, targets, strict=True))


def normalise(text: str, lowercase: bool) -> str:
    """The text in Unicode's composed form, with single spaces, in lower case if asked for."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.lower() if lowercase else text


class Words:
    """A vocabulary of words and punctuation marks; what it lacks is `<unk>`.

    Args:
        tokens: in the order of their ids, without the special tokens.
        lowercase: whether text is lower-cased first.
    """

    kind = "words"

    def __init__(self, tokens: list[str], lowercase: bool) -> None:
        self.tokens = [*SPECIAL, *tokens]
        self.lowercase = lowercase
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    @classmethod
    def of(cls, lines: Iterable[str], *, min_frequency: int, max_size: int, lowercase: bool) -> Words:
        """The most frequent words of the lines; equally frequent ones in the order of the alphabet.

        Args:
            min_frequency: number of times that a word must occur.
            max_size: largest number of tokens, special ones included.
        """
        counts = Counter(word for line in lines for word in split_words(normalise(line, lowercase)))
        frequent = sorted((word for word, n in counts.items() if n >= min_frequency), key=lambda w: (-counts[w], w))
        return cls(frequent[: max(0, max_size - len(SPECIAL))], lowercase)

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence, without `<sos>` and `<eos>`."""
        return [self.ids.get(word, UNK) for word in split_words(normalise(text, self.lowercase))]

    def decode(self, ids: Iterable[int]) -> str:
        """The sentence; special tokens but `<unk>` are left out."""
        words = " ".join(self.tokens[i] for i in ids if i == UNK or i >= len(SPECIAL))
        words = re.sub(r"([(\[]) ", r"\1", words)
        return re.sub(r" ([.,;:!?)\]])", r"\1", words)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "lowercase": self.lowercase, "tokens": self.tokens[len(SPECIAL) :]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Words:
        return cls(content["tokens"], content["lowercase"])


def split_words(text: str) -> list[str]:
    """Words, with hyphens and apostrophes inside them, and single punctuation marks."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*|[^\w\s]", text)


class BytePairs:
    """Byte-pair encoding by the `tokenizers` library: frequent words are one piece, others several.

    Only characters that the training text lacks are unknown. A piece that begins a word begins with "▁".

    Sources:
        Sennrich et al., Neural Machine Translation of Rare Words with Subword Units (2016).
    """

    kind = "bpe"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # "<eos>" in a text is five characters, not the end

    @classmethod
    def of(cls, lines: Iterable[str], *, min_frequency: int, max_size: int, lowercase: bool) -> BytePairs:
        """A vocabulary of the pieces that merging the most frequent pairs of the lines gives.

        Args:
            min_frequency: number of times that a pair must occur to be merged.
            max_size: largest number of pieces, special tokens and characters included.
        """
        tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
            + ([normalizers.Lowercase()] if lowercase else [])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=max_size, min_frequency=min_frequency, special_tokens=list(SPECIAL), show_progress=False,
            limit_alphabet=max(0, max_size - len(SPECIAL)),
        )  # fmt: skip
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def lowercase(self) -> bool:
        return bool(self.tokenizer.normalizer.normalize_str("A") == "a")

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence, without `<sos>` and `<eos>`."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The sentence; special tokens are left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": self.tokenizer.to_str()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> BytePairs:
        try:
            return cls(Tokenizer.from_str(content["tokenizer"]))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"no tokenizer of the tokenizers library: {error}") from error


Vocabulary = Words | BytePairs


@dataclass(frozen=True)
class Vocabularies:
    """The vocabularies of source and target; a joint vocabulary is the same object twice."""

    source: Vocabulary
    target: Vocabulary

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @classmethod
    def of(
        cls, pairs: list[tuple[str, str]], *, kind: str, min_frequency: int, max_size: int, lowercase: bool
    ) -> Vocabularies:
        """The vocabularies of the pairs: a joint one for "bpe", two for "words"."""
        limits: dict[str, Any] = {"min_frequency": min_frequency, "max_size": max_size, "lowercase": lowercase}
        if kind == BytePairs.kind:
            joint = BytePairs.of((line for pair in pairs for line in pair), **limits)
            return cls(joint, joint)
        return cls(*(Words.of(lines, **limits) for lines in zip(*pairs, strict=True)))

    def __str__(self) -> str:
        if self.joint:
            return f"joint vocabulary of {len(self.source)}"
        return f"vocabularies of {len(self.source)} and {len(self.target)}"

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source.to_json()} | ({} if self.joint else {"target": self.target.to_json()})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Vocabularies:
        kinds: dict[str, type[Vocabulary]] = {kind.kind: kind for kind in (Words, BytePairs)}
        saved = (content[name] for name in ("source", "target") if name in content)
        source, *target = (kinds[side["kind"]].from_json(side) for side in saved)
        return cls(source, *(target or [source]))
