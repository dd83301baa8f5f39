"""Fresh Python processes, forked from one that has imported torch: that import is most of what such a process takes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from torchvision_import import VISION

_ENVIRONMENT = dict(os.environ)  # before any test changes it

_SET_UP = """
import os, sys
os.chdir({folder!r})
os.environ.clear()
os.environ.update({environment!r})
sys.argv[1:] = {arguments!r}
sys.path[:] = [path for path in sys.path if path != {vision!r}]  # where there is what has to be prepared
for number, path in enumerate({said!r}, start=1):
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
"""


@functools.cache
def forks() -> ForkServerContext:
    """What makes such processes by functions, with the variables that this one had at first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.cpp_extension"])
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()
    return context


def run(
    code: str, *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """The outcome of `python -c code *arguments` where torch is imported already, after 200 seconds at most."""
    with tempfile.TemporaryDirectory() as folder:
        said = [f"{folder}/stdout", f"{folder}/stderr"]
        about = {"folder": str(cwd or Path.cwd()), "environment": dict(environment), "vision": str(VISION)}
        set_up = _SET_UP.format(**about, arguments=arguments, said=said)
        process = forks().Process(target=exec, args=(set_up + textwrap.dedent(code), {"__name__": "__main__"}))
        process.start()
        process.join(200)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(code, process.exitcode, *(Path(path).read_text() for path in said))


def run_module(name: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The same of `python -m name *arguments`."""
    return run(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments, **options)


def wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    """Waits for it, at most so long."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)
