"""Translation from two parallel text files, German to English as it stands."""

from __future__ import annotations

import argparse
import sys

from ..training import exit_code
from .train import add_train_arguments, run_train


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.translation", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train")
    add_train_arguments(train)
    train.set_defaults(program=run_train)
    args = parser.parse_args()
    return exit_code(lambda: args.program(args))


if __name__ == "__main__":
    sys.exit(main())
