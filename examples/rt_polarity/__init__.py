"""Film reviews of one sentence each, positive or negative: the data of two systems, and a few of our own for tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import torch

from examples.training import InputError

TINY = Path(__file__).parent / "data"
"""Sentences that we made up, in the layout and the encoding of the real ones."""


class Review(NamedTuple):
    """A sentence, and 1 if it is positive, 0 if not."""

    text: str
    label: int


def load(folder: Path | str, seed: int, test_share: float = 0.1) -> tuple[list[Review], list[Review]]:
    """The reviews for training, and those for testing: the same for the same seed, and both shuffled.

    Args:
        folder: with `rt-polarity.pos` and `rt-polarity.neg`, a sentence a line, ISO-8859-1.
        seed: of the split.
        test_share: how many of each label are for testing.

    Raises:
        InputError: a file is missing, or has no sentence.

    Sources:
        Pang and Lee, Seeing Stars (2005): the sentence polarity dataset v1.0.
    """
    shuffler = random.Random(seed)
    train, test = [], []
    for label, ending in enumerate(("neg", "pos")):
        reviews = [Review(text, label) for text in _sentences(Path(folder) / f"rt-polarity.{ending}")]
        shuffler.shuffle(reviews)
        for_testing = round(test_share * len(reviews))
        test += reviews[:for_testing]
        train += reviews[for_testing:]
    shuffler.shuffle(train)
    shuffler.shuffle(test)
    return train, test


def _sentences(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="iso-8859-1").splitlines()
    except OSError as error:
        raise InputError(f"{path} must be a file with a sentence a line, got {error.strerror}") from error
    if not (sentences := [line.strip() for line in lines if line.strip()]):
        raise InputError(f"{path} must have at least one sentence, got none")
    return sentences


def batches(reviews: list[Review], size: int, generator: torch.Generator) -> list[list[Review]]:
    """The reviews in random batches, each of about one length: so there is little padding.

    Args:
        size: reviews in a batch; the last one drawn may have fewer.
        generator: of the order.
    """
    order = torch.randperm(len(reviews), generator=generator).tolist()
    pool = 50 * size  # long enough to find alike lengths in, short enough for batches to differ between epochs
    found = []
    for start in range(0, len(order), pool):
        alike = sorted((reviews[i] for i in order[start : start + pool]), key=lambda review: len(review.text))
        found += [alike[i : i + size] for i in range(0, len(alike), size)]
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]
