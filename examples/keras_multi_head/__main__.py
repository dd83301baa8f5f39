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
        parser.add_argument(name, type=training.positive_int, default=default, metavar="N", help=f"default: {default}")
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
    train_reviews, test = rt_polarity.load(args.data, args.seed)
    words = Words.of(
        (review.text for review in train_reviews), min_frequency=args.min_frequency, max_size=100_000, lowercase=True
    )
    model = Classifier(
        len(words), 2, args.width, args.heads, args.blocks, args.dropout, max_length=MAX_WORDS
    ).to(args.device)  # fmt: skip

    def logits(texts: list[str]) -> tuple[Tensor, int]:
        ids = [words.encode(text)[:MAX_WORDS] for text in texts]
        return model(pad(ids).to(args.device)), sum(map(len, ids))

    names = ("batch_size", "min_frequency", "width", "heads", "blocks", "dropout", "lr")
    settings = {name: getattr(args, name) for name in names}
    settings["training_data_sha256"] = training.fingerprint(train_reviews)
    metrics = training.train(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01),
        run=training.Run.from_arguments(args, settings),
        batches=lambda generator: rt_polarity.batches(train_reviews, args.batch_size, generator),
        loss=lambda batch: rt_polarity.loss(logits, batch),
        evaluate=lambda epoch: {"accuracy": rt_polarity.accuracy(logits, test)},
        clip_norm=1.0,
    )
    print(rt_polarity.summary(metrics, test))


if __name__ == "__main__":
    sys.exit(main())
