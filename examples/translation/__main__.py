"""`python -m examples.translation train | translate | evaluate`."""

import argparse
import sys
from pathlib import Path

from ..training import add_arguments, exit_code, positive_int
from . import train as training


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.translation", description=training.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train")
    command.set_defaults(program=training.program)
    command.add_argument("--data", required=True, metavar="FOLDER")
    command.add_argument("--train", default="train")
    command.add_argument("--valid", default="val")
    command.add_argument("--source", default="de")
    command.add_argument("--target", default="en")
    command.add_argument("--vocabulary", choices=("bpe", "words"), default="bpe")
    command.add_argument("--min-frequency", type=positive_int, default=2)
    command.add_argument("--max-size", type=positive_int, default=6000)
    command.add_argument("--keep-case", action="store_true")
    command.add_argument("--max-length", type=positive_int, default=100)
    command.add_argument("--tokens", type=positive_int, default=2000)
    command.add_argument("--d-model", type=positive_int, default=256)
    command.add_argument("--nhead", type=positive_int, default=4)
    command.add_argument("--num-layers", type=positive_int, default=3)
    command.add_argument("--dim-feedforward", type=positive_int, default=512)
    command.add_argument("--dropout", type=float, default=0.2)
    command.add_argument("--learning-rate", type=float, default=1.5e-3)
    command.add_argument("--warmup", type=positive_int, default=1000)
    command.add_argument("--label-smoothing", type=float, default=0.1)
    command.add_argument("--average", type=positive_int, default=5)
    command.add_argument("--valid-sentences", type=positive_int, default=200)
    command.add_argument("--threads", type=positive_int)
    add_arguments(command, output="runs/translation", epochs=16)

    command = commands.add_parser("evaluate")
    command.set_defaults(program=evaluate)
    command.add_argument("--model", default="runs/translation")
    command.add_argument("--input", required=True)
    command.add_argument("--reference", required=True)
    command.add_argument("--beams", type=positive_int, default=5)
    command.add_argument("--length-penalty", type=float, default=1.0)

    args = parser.parse_args()
    return exit_code(lambda: args.program(args))


def evaluate(args: argparse.Namespace) -> None:
    from .decode import translate
    from .text import read_parallel

    model, vocabularies = training.load(Path(args.model))
    sources, targets = zip(*read_parallel(args.input, args.reference), strict=True)
    found = translate(model, vocabularies, sources, beams=args.beams, length_penalty=args.length_penalty)
    print(training.bleu(found, list(targets), False))


if __name__ == "__main__":
    sys.exit(main())
