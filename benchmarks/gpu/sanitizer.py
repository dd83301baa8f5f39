"""NVIDIA's compute-sanitizer over small cases of each backend, which `python -m benchmarks.gpu.sanitizer` runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastattn.backends import backend_by_name, objections
from fastattn.testing import CASES, make_inputs, run

from .record import REPOSITORY
from .rivals import serving

_TOOLS = ("memcheck", "racecheck", "initcheck")
_NOT_TOLD_APART = ("racecheck", "hopper")
"""Racecheck takes for races how Triton tells warps what to run, which a barrier of all warps orders: docs/hopper.md."""
_CASES = ("plain", "pad-queries-causal", "segments-causal", "everything")
_FOUND_ERRORS = 99  # the exit code that the sanitizer is asked for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives the test each tool and backend."""
    options = metafunc.config.option
    both = [(tool, backend) for tool in _TOOLS for backend in serving(options.device, options.only)]
    metafunc.parametrize(("tool", "backend"), [pair for pair in both if pair != _NOT_TOLD_APART])


def test_sanitizer_finds_nothing(tool: str, backend: str, record_property: Callable[[str, object], None]) -> None:
    """Fails with the errors that the sanitizer reports."""
    in_cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(in_cuda)
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer here")
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", str(_FOUND_ERRORS)]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # torch asks the driver for what it need not have
    # Else a tensor's neighbour is memory that it may touch.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, *options, sys.executable, "-m", __name__, backend]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    told = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    if done.returncode == _FOUND_ERRORS:
        pytest.fail("; ".join(told), pytrace=False)
    if done.returncode:
        pytest.skip(f"exit code {done.returncode}; {'; '.join(told)}; {done.stderr}")
    record_property("compute-sanitizer", "; ".join(told[-1:]))


def _run_small_cases(backend: str) -> None:
    """What the sanitizer watches: forward and backward of a few cases, whose answers the other tests check."""
    for case in (case for case in CASES if case.name in _CASES):
        for dtype in (torch.float16, torch.float32):
            inputs = make_inputs(case, dtype, "cuda")
            if not objections(backend_by_name(backend), inputs.q, inputs.k, inputs.v, inputs.spec()):
                run(inputs, backend)
                torch.cuda.synchronize()


if __name__ == "__main__":
    _run_small_cases(sys.argv[1])
