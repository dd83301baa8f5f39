"""Serves a language model over HTTP, or asks such a server many requests at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..training import exit_code
from .load import add_load_arguments, run_load
from .model import add_model_arguments
from .server import add_serve_arguments, run_serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, run, purpose in (
        ("serve", add_serve_arguments, run_serve, "serve until it is interrupted"),
        ("load", add_load_arguments, run_load, "check and time the answers to many requests at once"),
    ):
        command = commands.add_parser(name, help=purpose, description=run.__doc__)
        add(command)
        add_model_arguments(command)
        command.set_defaults(program=run)
    args = parser.parse_args(arguments)
    return exit_code(lambda: args.program(args))


if __name__ == "__main__":
    sys.exit(main())
