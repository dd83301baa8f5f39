"""What `make cuda` has found of the CUDA kernels, and whether it is of the sources as they are; Python is enough.

`python tests/compile_gates/cuda_record.py` prints the table of docs/build.md; `--is-current` exits with 0 or 1.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import records

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
    return records.markdown([list(each[0]), ["---"] * len(each[0]), *(list(cells.values()) for cells in each)])


if __name__ == "__main__":
    records.answer(__doc__, is_current, lambda: table(recorded()[1]))
