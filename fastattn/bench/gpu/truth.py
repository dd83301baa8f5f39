"""The stage "truth": the conformance suite and the tests for GPUs, test by test in workers, and NVIDIA's sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

from .compiling import compile_only
from .crew import Rows, Task
from .results import REPOSITORY
from .speed import gpu_answers

TEST_FILES = (
    "tests/test_conformance.py",
    "tests/test_truth.py",
    "tests/test_streams_and_graphs.py",
    "tests/test_triton.py",
)
_FOR_OTHER_GPUS = "test_kernels_compile_and_fit"  # for those that are not there
FIRST = "an import, and one case on each backend"
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck")
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
_FIRST_CASE = re.compile(r"test_case_is_right_or_refused\[.*-plain-torch\.bfloat16]")
_OF_STAGE_CUDA = ("native", "cuda")  # too much to compile and to run for a stage that is about all
_DRY = ("one-query-torch.float16", "test_case_of_pytorch_196678")
_SANITIZED = ("plain", "pad-queries-causal", "segments-causal", "everything")
_FOUND_ERRORS = 99  # the exit code that the sanitizer is asked for
_NOTE_LENGTH = 600


def serve(
    names: Iterator[str],
    answer: Callable[[Rows], None],
    device: str,
    compiling: bool = False,
    only: str | None = None,
    archs: str = "",
) -> None:
    """Runs tests by their pytest ids, and `FIRST`, whose rows are those of the first tests and one with all ids.

    Args:
        compiling: only compile what the tests launch; nothing is answered then.
        only: the backend that the first tests and the ids are about, None for all.
        archs: the code that the native CUDA module has, as TORCH_CUDA_ARCH_LIST has it; the names are then `named`.
    """
    import pytest

    if archs:
        os.environ[ARCH_LIST] = archs
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The configuration of pyproject.toml asks for plugins that a machine with a GPU need not have.
    options = ["-c", os.devnull, f"--rootdir={REPOSITORY}", "-q", "-p", "no:cacheprovider"]
    files = [str(REPOSITORY / path) for path in TEST_FILES]
    with compile_only() if compiling else nullcontext():
        runner = _Runner(names, (lambda rows: answer([])) if compiling else answer, device, only, archs)
        status = pytest.main([*options, *files], plugins=[runner])
    if not runner.begun:
        raise SystemExit(f"pytest found nothing to run (exit code {status})")


class _Runner:
    """A plugin that runs the tests it is told to, one by one, instead of all."""

    def __init__(
        self, names: Iterator[str], answer: Callable[[Rows], None], device: str, only: str | None, archs: str
    ) -> None:
        self.names, self.answer, self.device, self.only, self.archs = names, answer, device, only, archs
        self.begun = False
        self.reports: list = []

    def pytest_runtestloop(self, session) -> bool:
        self.begun = not session.testsfailed  # else a file cannot be imported, and pytest has printed why
        items = {item.nodeid: item for item in session.items if _FOR_OTHER_GPUS not in item.nodeid}
        for name in self.names if self.begun else ():
            if name == FIRST:
                ids = [id_ for id_ in items if belongs(id_, self.only, self.device)]
                first = [id_ for id_ in ids if _FIRST_CASE.search(id_)]
                self.answer([{"ids": ids}, *(self._run(items[id_]) for id_ in first)])
                continue
            row = self._run(items[name.removesuffix(named("", self.archs))])
            self.answer([row])
            if row["verdict"] == "wrong" and self.device == "cuda" and not gpu_answers():
                break
        return True

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def _run(self, item) -> dict[str, object]:
        self.reports = []
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        failed = [report for report in self.reports if report.failed]
        skipped = [report for report in self.reports if report.skipped]
        notes = [f"{name}: {value}" for report in self.reports[-1:] for name, value in report.user_properties]
        notes += [_reason(report) for report in failed or skipped]
        verdict = "wrong" if failed else "skipped" if skipped else "right"
        return {"test": item.nodeid, "verdict": verdict, "note": "; ".join(notes)[:_NOTE_LENGTH]}


def _reason(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


def backend_names() -> list[str]:
    """The names of all backends."""
    from fastattn.backends import BACKENDS

    return [backend.NAME for backend in BACKENDS]


def named(task: str, archs: str) -> str:
    """The name of a task that runs the native CUDA module with code for these archs; as it is for this GPU's own."""
    return f"{task} for {archs}" if archs else task


def belongs(id_: str, only: str | None, device: str) -> bool:
    """Whether a test is part of a stage that is about one backend on a device, or of one about all."""
    places = list(pairwise(_parameters(id_)))
    return (only, device) in places if only else _OF_STAGE_CUDA not in places


def compiles(id_: str, fused: list[str]) -> bool:
    """Whether a test launches kernels that are compiled at run time: those of these backends, by its parameters."""
    return any(name in _parameters(id_) for name in fused)


def _parameters(id_: str) -> list[str]:
    return id_.partition("[")[2].rstrip("]").split("-")


def in_dry_run(id_: str) -> bool:
    """Whether a test is one of the few of a dry run."""
    return any(part in id_ for part in _DRY)


def sanitizer_tasks(backends: list[str]) -> list[Task]:
    """One for each backend and tool."""
    return [Task(f"compute-sanitizer {tool} {name}", 240.0) for name in backends for tool in SANITIZER_TOOLS]


def serve_sanitizer(names: Iterator[str], answer: Callable[[Rows], None], limit_s: float = 230.0) -> None:
    """Runs compute-sanitizer's tools over small cases of one backend."""
    sanitizer = shutil.which("compute-sanitizer") or _in_cuda("compute-sanitizer")
    for name in names:
        _, tool, backend = name.split()
        if sanitizer is None:
            answer([{"verdict": "n/a", "note": "there is no compute-sanitizer here"}])
            continue
        options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", str(_FOUND_ERRORS)]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]  # torch asks the driver for what it need not have
        environment = os.environ | {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else a tensor's neighbour is memory that it may touch
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sanitizer, *options, sys.executable, "-m", __name__, backend]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
        told = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
        if done.returncode == 0:
            answer([{"verdict": "right", "note": told[-1] if told else ""}])
        elif done.returncode == _FOUND_ERRORS:
            answer([{"verdict": "wrong", "note": "; ".join(told)[:_NOTE_LENGTH]}])
        else:
            said = f"exit code {done.returncode}; {'; '.join(told)}; {done.stderr[-_NOTE_LENGTH:]}"
            answer([{"verdict": "n/a", "note": said}])


def _in_cuda(program: str) -> str | None:
    path = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / program
    return str(path) if path.is_file() else None


def _run_small_cases(backend: str) -> None:
    """What the sanitizer watches: forward and backward of a few cases, whose answers the other tests check."""
    import torch

    from fastattn.backends import backend_by_name, objections
    from fastattn.testing import CASES, make_inputs, run

    for case in (case for case in CASES if case.name in _SANITIZED):
        for dtype in (torch.float16, torch.float32):
            inputs = make_inputs(case, dtype, "cuda")
            if not objections(backend_by_name(backend), inputs.q, inputs.k, inputs.v, inputs.spec()):
                run(inputs, backend)
                torch.cuda.synchronize()


if __name__ == "__main__":
    _run_small_cases(sys.argv[1])
