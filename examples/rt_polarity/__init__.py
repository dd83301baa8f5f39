"""The data of two systems: film reviews of one sentence, positive or negative, with 40 made-up ones for tests."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..training import InputError, Loss, Run, batches_of_alike, positive_int, train

TINY = Path(__file__).parent / "data"
"""Sentences that we made up, in the layout and the encoding of the real ones."""


Logits = Callable[[list[str]], tuple[Tensor, int]]
"""The function that a program supplies: from texts to logits [B, 2] and the number of real tokens that were read."""


class Review(NamedTuple):
    """A sentence, and 1 if it is positive, 0 if not."""

    text: str
    label: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a program that learns from the reviews to the parser."""
    parser.add_argument(
        "--data", default=str(TINY), metavar="FOLDER",
        help="with rt-polarity.pos and rt-polarity.neg, a sentence a line, ISO-8859-1; default: 40 made-up sentences",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=positive_int, default=32, metavar="N", help="default: 32")


def load(folder: Path | str, seed: int, test_share: float = 0.1) -> tuple[list[Review], list[Review]]:
    """The reviews for training and the reviews for testing, both shuffled by the seed.

    Args:
        folder: with `rt-polarity.pos` and `rt-polarity.neg`, a sentence a line, ISO-8859-1.
        seed: seed of the split and of the order.
        test_share: share of the reviews of each label that are for testing.

    Raises:
        InputError: a file is missing or has no sentence, or none is left for training or testing.

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
    if not train or not test:
        raise InputError(f"{folder} must have sentences for training and for testing, got {len(train)} and {len(test)}")
    shuffler.shuffle(train)
    shuffler.shuffle(test)
    return train, test


def _sentences(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="iso-8859-1").split("\n")  # byte 85, an ellipsis to some, ends no line
    except OSError as error:
        raise InputError(f"{path} must be a file with a sentence a line, got {error.strerror}") from error
    if not (sentences := [line.strip() for line in lines if line.strip()]):
        raise InputError(f"{path} must have at least one sentence, got none")
    return sentences


def batches(reviews: list[Review], size: int, generator: torch.Generator) -> list[list[Review]]:
    """The reviews in the batches of `batches_of_alike`."""
    chosen = batches_of_alike([len(review.text) for review in reviews], size, generator)
    return [[reviews[i] for i in batch] for batch in chosen]


def loss(logits: Logits, batch: list[Review]) -> Loss:
    """The cross-entropy of a batch."""
    predicted, tokens = logits([review.text for review in batch])
    labels = torch.tensor([review.label for review in batch], device=predicted.device)
    return Loss(F.cross_entropy(predicted, labels), len(batch), tokens)


def accuracy(logits: Logits, reviews: list[Review], batch_size: int = 64) -> float:
    """The share of reviews whose label has the larger logit."""
    right = 0
    for start in range(0, len(reviews), batch_size):
        batch = reviews[start : start + batch_size]
        predicted = logits([review.text for review in batch])[0].argmax(-1).tolist()
        right += sum(label == review.label for label, review in zip(predicted, batch, strict=True))
    return right / len(reviews)


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    logits: Logits,
    parts: tuple[list[Review], list[Review]],
    args: argparse.Namespace,
    schedule: LRScheduler | None = None,
    **settings: Any,
) -> None:
    """Trains the model as the options and further settings say, and prints the accuracy on the test reviews."""
    reviews, test = parts
    metrics = train(
        model,
        optimizer,
        run=Run.from_arguments(args, reviews, **settings),
        batches=lambda generator: batches(reviews, args.batch_size, generator),
        loss=lambda batch: loss(logits, batch),
        evaluate=lambda epoch: {"accuracy": accuracy(logits, test)},
        schedule=schedule,
        clip_norm=1.0,
    )
    print(
        f"accuracy = {metrics['history'][-1]['accuracy']:.3f} on {len(test)} test sentences after "
        f"{metrics['epochs']} epochs, {metrics['seconds']} s, {metrics['tokens_per_second']} tokens/s"
    )
