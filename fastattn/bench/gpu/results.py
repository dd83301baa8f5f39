"""The results file: every row measured on one kind of GPU with one torch and one Triton, saved as it comes.

A row belongs to a task of a stage. A task is finished for the sources that it ran with, and not done again for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path

from ..machine import gpu_state, machine, now, versions
from ..report import SCHEMA
from .crew import Rows

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "benchmarks" / "results"
_SOURCES = ("fastattn", "csrc", "tests")
_SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh"}
_SAVE_EVERY_S = 2.0


class Results:
    """A results file in memory; `save` writes it."""

    def __init__(self, folder: Path, device: str, commit: str = "") -> None:
        """Goes on with what the folder has, or else the repository.

        Args:
            commit: of the sources, where they are no git checkout that would tell.
        """
        about, self.device = versions(), device
        if commit:
            about["fastattn"] = f"{about['fastattn'].partition(' ')[0]} ({commit})"
        self.sources, self.versions = sources(), about
        found = machine(device)
        self.path = folder / file_name(str(found.get("gpu", "cpu")), about["torch"], about["triton"])
        earlier = [path for path in (self.path, FOLDER / self.path.name) if path.is_file()]
        self.document: dict = json.loads(earlier[0].read_text()) if earlier else {"runs": [], "rows": []}
        self.document |= {"schema": SCHEMA, "device": device, "machine": found, "versions": about}
        self._saved = 0.0

    def finished(self, stage: str) -> set[str]:
        """The names of the tasks that have rows of these sources."""
        return {row["task"] for row in self.rows(stage) if row["sources"] == self.sources}

    def rows(self, stage: str) -> Rows:
        """Those of a stage, of any sources."""
        return [row for row in self.document["rows"] if row["stage"] == stage]

    def add(self, stage: str, task: str, rows: Rows) -> None:
        """Replaces the rows of a task, and saves from time to time."""
        of_task = {"stage": stage, "task": task, "sources": self.sources}
        others = [row for row in self.document["rows"] if (row["stage"], row["task"]) != (stage, task)]
        self.document["rows"] = others + [of_task | row for row in rows]
        if time.monotonic() > self._saved + _SAVE_EVERY_S:
            self.save()

    def forget_failures(self, stage: str) -> None:
        """Drops the rows of tasks that have one that failed, so that they are done again."""
        failed = {row["task"] for row in self.rows(stage) if is_failure(row)}
        self.document["rows"] = [x for x in self.document["rows"] if x["stage"] != stage or x["task"] not in failed]

    def begin_run(self, stage: str) -> None:
        """Notes that a stage begins, on which commit and at which clocks."""
        run = {"stage": stage, "date": now(), "commit": self.versions["fastattn"], "sources": self.sources}
        self.document["runs"].append(run | {"state_before": gpu_state(self.device)})

    def end_run(self, done: int, left: int) -> None:
        """Notes how the run of a stage ended, and saves."""
        self.document["runs"][-1] |= {"state_after": gpu_state(self.device), "done": done, "left": left}
        self.save()

    def save(self) -> None:
        """Writes the file at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        rows = ",\n".join(json.dumps(row) for row in self.document["rows"])  # a line each, for diffs
        head = json.dumps({name: value for name, value in self.document.items() if name != "rows"}, indent=1)
        unfinished.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')
        os.replace(unfinished, self.path)
        self._saved = time.monotonic()


def is_failure(row: dict[str, object]) -> bool:
    """Whether fastattn gave a wrong answer in a row, or a worker none."""
    return row.get("family", "fastattn") == "fastattn" and row["verdict"] not in ("right", "n/a", "skipped")


def file_name(gpu: str, torch: str, triton: str) -> str:
    """Such as "nvidia-h200-2.11.0-3.6.0.json"."""
    parts = (gpu, torch.partition("+")[0], triton.partition("+")[0])
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json"


def sources() -> str:
    """A hash of all that a stage runs: it is the same where, and only where, a finished task need not be done again."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
