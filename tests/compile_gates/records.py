"""What the records of the compile gates have in common: a table, and the command that answers for one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence


def markdown(lines: Iterable[Sequence[object]]) -> str:
    """A table of these cells, of which the second line says how columns are aligned."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def answer(description: str | None, is_current: Callable[[], bool], table: Callable[[], str]) -> None:
    """Prints the table, or with `--is-current` exits with 0 or 1."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--is-current", action="store_true", help="whether the record is of the sources as they are")
    if parser.parse_args().is_current:
        sys.exit(not is_current())
    print(table())
