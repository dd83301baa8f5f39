"""Runs suites in processes of pytest, in which a test that crashes or hangs costs the others nothing.

A fault on the GPU spoils every later call of its process, and a kernel may never end. Neither can be caught inside the
process: `plugin.py` records there which test has begun and what became of it, and where it fails another one goes on.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .record import REPOSITORY, append

# What a process of pytest says in place of the test that it is at, and may then be killed.
ALL_ENDED = "all tests have ended"
GPU_IS_LOST = "the GPU does not answer any more"
START_LIMIT_S = 150.0  # to import torch, on a machine whose every core does the same
_LOG_TAIL = 1500  # characters
_TELL_EVERY_S = 2.0
# The configuration of pyproject.toml asks for plugins that a machine with a GPU need not have.
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-s", "-c", os.devnull, f"--rootdir={REPOSITORY}"),
    *("-p", "no:cacheprovider", "-p", "benchmarks.gpu.plugin"),
    *("-o", "pythonpath=" + shlex.join(map(str, (REPOSITORY, REPOSITORY / "tests", *REPOSITORY.glob("tests/*/"))))),
)


class StartError(Exception):
    """A process ended before it began a test; the message has what it wrote."""


@dataclass(frozen=True)
class Suite:
    """Tests that are run alike.

    arguments: files and options for pytest.
    limit_s: a test that takes longer counts as hung.
    workers: the number of processes that share the tests.
    """

    arguments: tuple[str, ...]
    limit_s: float = 60.0
    workers: int = 1


def run(suites: list[Suite], path: Path, stage: str, sources: str, deadline: float) -> bool:
    """Runs the unfinished tests of some suites at the same time; whether that was done by the deadline, of time.time().

    The record at that path gets a line for each. A test that ends its process has the verdict "died" there, one that
    exceeds its limit "hung", and one that is under way at the deadline none.

    Raises:
        StartError: a process cannot start.
    """
    about = {"path": str(path.resolve()), "stage": stage, "sources": sources, "supervisor": os.getpid()}
    shares = [_share(suite, about | {"share": [n, suite.workers]}) for suite in suites for n in range(suite.workers)]
    told = 0.0
    try:
        while shares and time.time() < deadline:
            tests = [next(share, None) for share in shares]
            shares = [share for share, test in zip(shares, tests, strict=True) if test is not None]
            if time.time() > told + _TELL_EVERY_S and (test := next(filter(None, tests), "")):
                told = time.time()
                print(f"{stage} ({deadline - told:.0f} s left): {test}", file=sys.stderr, flush=True)
            time.sleep(0.05)
        return not shares
    finally:
        for share in shares:
            share.close()


def _share(suite: Suite, about: dict) -> Iterator[str]:
    """Runs a share of a suite in one process after the other, and yields the test that it is at, now and then."""
    with tempfile.TemporaryDirectory() as folder:
        current, log = Path(folder, "current"), Path(folder, "log")
        command = [*_PYTEST, f"--share={json.dumps(about | {'current': str(current)})}", *suite.arguments]
        test = ""
        while test != ALL_ENDED:
            current.write_text("")
            with _process(command, log) as process:
                verdict, why = yield from _watch(process, current, suite.limit_s)
            test = current.read_text()
            said = f"{why}; {log.read_bytes()[-_LOG_TAIL:].decode(errors='replace').strip()}"
            if not test:
                raise StartError(f"a process of pytest {verdict}: {said}")
            if test not in (ALL_ENDED, GPU_IS_LOST):
                print(f"{test}: {verdict}: {said}", file=sys.stderr, flush=True)
                line = {name: about[name] for name in ("stage", "sources")} | {"test": test}
                append(Path(about["path"]), line | {"rows": [{"verdict": verdict, "note": said}]})


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A process that writes to a log, and ends with this block together with all that it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(process: subprocess.Popen, current: Path, limit_s: float) -> Generator[str, None, tuple[str, str]]:
    """Yields the test that a process is at; in the end returns the verdict on it, if it is one, and why."""
    while (code := process.poll()) is None and (test := current.read_text()) not in (ALL_ENDED, GPU_IS_LOST):
        limit = limit_s if test else START_LIMIT_S
        if time.time() > current.stat().st_mtime + limit:
            return "hung", f"no end in {limit:.0f} s"
        yield test
    return "died", f"exit code {code}"
