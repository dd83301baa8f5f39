"""What `make cuda` has found of the CUDA kernels, and whether it is of the sources as they are; Python is enough.

`python tests/compile_gates/cuda_record.py` prints the table of docs/build.md; `--is-current` exits with 0 or 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("cuda_compiled.json")
_SOURCES = Path(__file__).parents[2] / "csrc"

ARCHS = (75, 80, 90, 120)
"""Without bf16 and asynchronous copies, the first with both, and one of each later kind that is common."""


def digest() -> str:
    """Of all that the kernels are made of."""
    result = hashlib.sha256()
    for path in sorted([*_SOURCES.glob("*.h"), *(_SOURCES / "cuda").glob("*.[ch]*")]):
        result.update(f"{path.relative_to(_SOURCES)}\n{path.read_text()}".encode())
    return result.hexdigest()[:16]


def recorded() -> tuple[str, dict[str, dict]]:
    """The digest and, by arch, a row of the table, by its columns; "" and none where there is no record."""
    if not FILE.is_file():
        return "", {}
    document = json.loads(FILE.read_text())
    return document["digest"], document["archs"]


def is_current() -> bool:
    """Whether the record is of these sources, and of every arch."""
    of_record, archs = recorded()
    return of_record == digest() and {int(arch) for arch in archs} >= set(ARCHS)


def record(archs: dict[int, dict]) -> None:
    """Writes the record, a line for each arch."""
    rows = ",\n".join(f'"{arch}": {json.dumps(cells)}' for arch, cells in archs.items())
    FILE.write_text(f'{{"digest": "{digest()}", "archs": {{\n{rows}\n}}}}\n')


def table(archs: dict) -> str:
    """Markdown: a line for each arch."""
    each = list(archs.values())
    lines = [list(each[0]), ["---"] * len(each[0]), *(list(map(str, cells.values())) for cells in each)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--is-current", action="store_true")
    options = parser.parse_args()
    if options.is_current:
        sys.exit(not is_current())
    print(table(recorded()[1]))


if __name__ == "__main__":
    main()
