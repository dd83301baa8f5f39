"""A pytest plugin for the processes of a stage: it runs a share of the tests, and records each as it ends.

A test hands over its rows with `record_property("row", ...)`. One that fails, or hands over none, has a row of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fastattn.backends.compiling import compile_only

from . import record
from .supervisor import ALL_ENDED, GPU_IS_LOST

_NOTE_LENGTH = 3000
_PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suites, for use by hand too, and the one of the supervisor."""
    group = parser.getgroup("benchmarks.gpu")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a few small sizes")
    group.addoption("--only", metavar="BACKEND", help="default: all backends that serve there without being named")
    group.addoption("--archs", help="what the CUDA module is compiled for, as TORCH_CUDA_ARCH_LIST says it")
    group.addoption("--compile-only", action="store_true", help="compile the kernels of the tests without a launch")
    group.addoption("--share", type=json.loads, help=_Share.__doc__)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.archs:
        os.environ["TORCH_CUDA_ARCH_LIST"] = config.option.archs
    if config.option.share:
        config.pluginmanager.register(_Share(config.option, **config.option.share))


class _Share:
    """JSON of: which tests, as [first, step]; their stage and sources; the files `path`, `current`; the parent's id."""

    def __init__(
        self, option, share: list[int], stage: str, sources: str, path: str, current: str, supervisor: int
    ) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # else a test that hangs would keep the GPU
        if os.getppid() != supervisor:
            pytest.exit("the supervisor has ended already", pytest.ExitCode.INTERRUPTED)
        self.option, (self.first, self.step), self.stage, self.sources = option, share, stage, sources
        self.path, self.current = Path(path), Path(current)
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        finished = record.finished(self.path, self.stage, self.sources)
        items[:] = [item for item in items[self.first :: self.step] if self._name(item) not in finished]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        with compile_only() if self.option.compile_only else nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Says which test is run, and records it; leaves this process where that cannot use the GPU any more."""
        self.current.write_text(self._name(item))
        start, self.reports = time.monotonic(), []
        result = yield
        is_lost = self.option.device == "cuda" and not _gpu_answers()
        rows = [row | {"seconds": round(time.monotonic() - start, 2)} for row in self._rows(is_lost)]
        line = {"stage": self.stage, "test": self._name(item), "sources": self.sources, "rows": rows}
        record.append(self.path, line)
        if is_lost:
            self.current.write_text(GPU_IS_LOST)
            pytest.exit(GPU_IS_LOST)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.current.write_text(ALL_ENDED)

    def _name(self, item: pytest.Item) -> str:
        return f"{item.nodeid} for {self.option.archs}" if self.option.archs else item.nodeid

    def _rows(self, is_lost: bool) -> record.Rows:
        properties = self.reports[-1].user_properties
        rows = [value for name, value in properties if name == "row"]
        failed = [report for report in self.reports if report.failed]
        skipped = [report for report in self.reports if report.skipped]
        if failed or is_lost or not rows:
            notes = [f"{name}: {value}" for name, value in properties if name != "row"]
            notes += [_reason(report) for report in failed or skipped]
            notes += ["the GPU does not answer after it"] if is_lost else []
            verdict = "wrong" if failed or is_lost else "skipped" if skipped else "right"
            rows.append({"verdict": verdict, "note": "; ".join(notes)[:_NOTE_LENGTH]})
        return rows


def _reason(report: pytest.TestReport) -> str:
    """The message of a failure or a skip."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else report.longrepr[2] if report.skipped else str(report.longrepr)
    return said.removeprefix("Failed: ").removeprefix("Skipped: ")


def _gpu_answers() -> bool:
    """Whether the GPU still does anything for this process."""
    import torch

    try:
        return torch.ones(2, device="cuda").sum().item() == 2
    except RuntimeError:
        return False
