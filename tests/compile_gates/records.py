"""What the records of the compile gates have in common: the digest of sources, a table, the command that answers."""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import sys
import tokenize
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

CHOSEN = "3.7.1"
"""The Triton of constraints.txt."""
TRITONS = ("3.6.0", CHOSEN, "3.8.0", "3.9.0")
_NO_KERNELS = {"build.py", "kept_results.py", "record.py"}
"""Progress, what is computed once, and which of the tiles that stand in the files of a backend is the best here."""
_BACKENDS = Path(__file__).parents[2] / "fastattn" / "backends"


def digest(backend: str) -> str:
    """Of the sources that the kernels of a backend are made of, without comments, docstrings and empty lines."""
    result = hashlib.sha256()
    for path in sources(backend):
        result.update(f"{path.relative_to(_BACKENDS)}\n{code_of(path.read_text())}".encode())
    return result.hexdigest()[:16]


def sources(backend: str) -> list[Path]:
    """The files of a backend, and those of other backends that they import, whatever the depth.

    Not those of _NO_KERNELS, and what they import: whatever they say, the same kernels are compiled.
    """
    result, waiting = set(), sorted((_BACKENDS / backend).glob("*.py"))
    while waiting:
        path = waiting.pop()
        if path in result or path.name in _NO_KERNELS:
            continue
        result.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                named = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
                waiting += [other for other in named if other.is_file() and _BACKENDS in other.parents]
    return sorted(result)


def code_of(source: str) -> str:
    """A source without its comments, docstrings and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def read(file: Path) -> tuple[str, list[dict]]:
    """The digest and the lines of a record of kernels; "" and none where there is no record."""
    if not file.is_file():
        return "", []
    document = json.loads(file.read_text())
    return document["digest"], document["kernels"]


def write(file: Path, digest: str, kernels: Iterable[object]) -> None:
    """Writes a record of kernels, each a dataclass, a line for each."""
    rows = ",\n".join(json.dumps(asdict(kernel)) for kernel in kernels)
    file.write_text(f'{{"digest": "{digest}", "kernels": [\n{rows}\n]}}\n')


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
