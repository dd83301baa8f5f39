"""Trains a classifier of film reviews whose attention is the multi-head layer of Keras BERT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from examples import rt_polarity, training
from examples.translation.batches import pad
from examples.translation.text import Words

from .model import Classifier

MAX_WORDS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.keras_multi_head", description=__doc__)
    rt_polarity.add_arguments(parser)
    for name, default in (("--min-frequency", 2), ("--width", 64), ("--heads", 4), ("--blocks", 1)):
        training.add_number(parser, name, default)
    parser.add_argument("--dropout", type=training.probability, default=0.5, help="default: 0.5")
    parser.add_argument("--lr", type=training.non_negative, default=1e-3, help="learning rate; default: 0.001")
    training.add_arguments(parser, output="runs/keras_multi_head", epochs=10)
    args = parser.parse_args(arguments)
    return training.exit_code(lambda: train(args))


def train(args: argparse.Namespace) -> None:
    """Trains as the arguments say, and prints the accuracy on the test reviews."""
    if args.width % args.heads:
        raise training.InputError(f"--heads must divide --width, which is {args.width}, got {args.heads}")
    training.seed_everything(args.seed)
    parts = rt_polarity.load(args.data, args.seed)
    texts = (review.text for review in parts[0])
    words = Words.of(texts, min_frequency=args.min_frequency, max_size=100_000, lowercase=True)
    model = Classifier(
        len(words), 2, args.width, args.heads, args.blocks, args.dropout, max_length=MAX_WORDS
    ).to(args.device)  # fmt: skip

    def logits(texts: list[str]) -> tuple[Tensor, int]:
        ids = [words.encode(text)[:MAX_WORDS] for text in texts]
        return model(pad(ids).to(args.device)), sum(map(len, ids))

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    rt_polarity.fit(model, optimizer, logits, parts, args)


if __name__ == "__main__":
    sys.exit(main())
