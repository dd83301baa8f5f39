"""`transformers serve`: the server takes fastattn's names for `--attn-implementation`, and `fastattn serve` starts it.

What is read of transformers' internals was tried with the versions in constraints.txt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers.cli.serving.model_manager import ModelManager

from .transformers import IMPLEMENTATION, PACKED, put_around


def _knowing_ours(validate: Callable) -> Callable:
    """The server's check of its options, which knows the names of transformers alone, with those of fastattn."""

    def check(manager: object) -> None:
        asked = manager.attn_implementation
        if asked in (IMPLEMENTATION, PACKED):
            manager.attn_implementation = None  # the rest is checked
        try:
            validate(manager)
        finally:
            manager.attn_implementation = asked

    return check


put_around(ModelManager, "_validate_args", _knowing_ours)


def serve(arguments: Sequence[str]) -> None:
    """Runs `transformers serve` with these arguments, and attention by fastattn unless they name another one.

    Raises:
        ImportError: transformers, or a package that its server needs, is not installed.
        OSError: there is no such model.
        SystemExit: at the end, since the command line of transformers ends so.
    """
    from transformers.cli.transformers import app

    # Of an option that is given twice the last one counts.
    app(["serve", "--attn-implementation", IMPLEMENTATION, *arguments], prog_name="fastattn")
