"""Builds of the CUDA module: for this GPU and for older ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastattn.backends import build

from .stages import OLDER

_LOG_TAIL = 2900  # characters


@pytest.mark.parametrize("archs", ["", OLDER], ids=["this GPU", OLDER])
def test_build(archs: str, pytestconfig: pytest.Config) -> None:
    """Fails with the end of what the compiler has said last."""
    command = [sys.executable, "-m", "fastattn", "build"]
    if pytestconfig.option.device == "cuda":
        command.append("--cuda")
    done = subprocess.run(command, env=os.environ | ({"TORCH_CUDA_ARCH_LIST": archs} if archs else {}))
    if done.returncode:
        logs = sorted(build.cache_dir().glob("*.log"), key=lambda path: path.stat().st_mtime)
        said = "".join(path.read_text(errors="replace")[-_LOG_TAIL:] for path in logs[-1:])
        pytest.fail(f"exit code {done.returncode}; {said}", pytrace=False)
