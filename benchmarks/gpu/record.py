"""The record of one kind of GPU with one torch and one Triton: a file of JSON lines, which many processes append to.

A line is the beginning of a run, its end, or a test with its rows, of which the last one counts. A test is finished for
the sources that it ran with, and not run again for them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("fastattn", "csrc", "tests", "benchmarks/gpu")
_SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh"}
Row = dict[str, object]
Rows = list[Row]


def append(path: Path, line: dict) -> None:
    """Writes a line at once, so that it is whole, whatever becomes of this process and whoever else appends."""
    with path.open("ab+", buffering=0) as file:
        if end := file.tell():
            file.seek(end - 1)
        after = b"" if not end or file.read(1) == b"\n" else b"\n"  # which the disk had no room for
        file.write(after + json.dumps(line).encode() + b"\n")


def _lines(path: Path) -> Iterator[tuple[str, dict]]:
    """The lines that are whole, as they are and as what they say."""
    for text in path.read_text().splitlines(keepends=True):
        with suppress(json.JSONDecodeError):
            yield text, json.loads(text)


def load(path: Path) -> dict:
    """The `runs`, the `device`, `machine` and `versions` of the last one, and the `rows` with their stage and test."""
    runs: list[dict] = []
    tests: dict[tuple[str, str], Rows] = {}
    for _, line in _lines(path):
        if "begin" in line:
            runs.append(line["begin"])
        elif "end" in line:
            runs[-1] |= line["end"]
        else:
            about = {name: line[name] for name in ("stage", "test", "sources")}
            tests[line["stage"], line["test"]] = [about | row for row in line["rows"]]
    about = {name: runs[-1][name] for name in ("device", "machine", "versions")}
    return about | {"runs": runs, "rows": [row for rows in tests.values() for row in rows]}


def finished(path: Path, stage: str, sources: str) -> set[str]:
    """The names of the tests of a stage that have run with these sources."""
    return {line["test"] for _, line in _lines(path) if (line.get("stage"), line.get("sources")) == (stage, sources)}


def forget(path: Path, stage: str, is_forgotten: Callable[[str, Rows], bool]) -> None:
    """Takes tests of a stage out of a record, by their names and rows."""
    from fastattn.bench.writing import replacing  # which imports torch, as the processes of a suite need not

    kept = [text for text, x in _lines(path) if x.get("stage") != stage or not is_forgotten(x["test"], x["rows"])]
    with replacing(path) as part:
        part.write_text("".join(kept))


def is_failure(row: Row) -> bool:
    """Whether fastattn gave a wrong answer in a row, or none."""
    return row.get("family", "fastattn") == "fastattn" and row["verdict"] not in ("right", "n/a", "skipped")


def file_name(gpu: str, torch: str, triton: str) -> str:
    """Such as "nvidia-h200-2.11.0-3.6.0.jsonl"."""
    parts = (gpu, torch.partition("+")[0], triton.partition("+")[0])
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".jsonl"


def sources() -> str:
    """A hash of all that a stage runs: it is the same where, and only where, a finished test need not be run again."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
