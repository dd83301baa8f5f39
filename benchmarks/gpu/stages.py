"""Suites of each stage, as arguments of pytest, within its time and going on where it stopped."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fastattn.backends import backend_by_name, cuda
from fastattn.bench import tune
from fastattn.machine import gpu_state, machine, now
from fastattn.testing import CASES, make_inputs

from .record import Row, append, finished, is_failure, load, sources
from .supervisor import Suite, run

STAGES = ("truth", "bench", "hopper", "cuda")
OLDER = "7.5+PTX"  # the code for GPUs without bf16, which newer ones compile for themselves
_TESTS = tuple(f"tests/backends/test_{name}.py" for name in ("conformance", "truth", "streams_and_graphs", "triton"))
_DRY_TESTS = "(plain-torch.bfloat16 or one-query-torch.float16 or test_case_of_pytorch_196678)"
_DRY_LIMIT_S = 400.0  # a CPU has other work too
_COMPILING_SHARE = 0.7  # of the time that is left to its part, at most


class StageError(Exception):
    """A stage cannot be run as asked, or what it ran is wrong; the message is one sentence."""


@dataclass(frozen=True)
class Part:
    """Suites that run at the same time.

    to_compile: is run before, for what it leaves in the caches of compilers.
    share: of the time of the stage, until which the part may run.
    """

    suites: list[Suite]
    to_compile: Suite | None = None
    share: float = 1.0


def only_of(stage: str, device: str) -> str | None:
    """The backend that a stage is about, or None for all; a dry run of cuda is about the one on the CPU."""
    return {"hopper": "hopper", "cuda": device}.get(stage)


def parts(stage: str, device: str) -> dict[str, Part]:
    """The parts of a stage by name, in the order they run; for "cpu" those of a dry run, with a few small cases."""
    only, is_dry, cores = only_of(stage, device), device == "cpu", len(os.sched_getaffinity(0))
    options = (f"--device={device}", *([f"--only={only}"] if only else []))

    def suite(*arguments: str, limit_s: float = 60.0, workers: int = 1) -> Suite:
        return Suite((*options, *arguments), _DRY_LIMIT_S if is_dry else limit_s, workers)

    def to_compile(*arguments: str) -> Suite | None:
        if stage == "cuda":
            return suite("benchmarks/gpu/build.py", limit_s=240.0, workers=2)
        return None if is_dry else suite(*arguments, limit_s=150.0, workers=cores)

    result = {}
    if stage == "hopper":  # whose kernels may hang, which single calls tell soonest
        calls = ("benchmarks/gpu/first_calls.py", *(["-k", "tile-128-full"] if is_dry else []))
        result["first calls"] = Part([suite(*calls, limit_s=30.0)], to_compile("--compile-only", *calls), share=0.4)
    if stage != "bench":
        # The CUDA backend is too much to compile and to run for a stage that is about all.
        every = "not cuda-cuda" if is_dry else "(cuda or test_triton) and not cuda-cuda and not reference"
        chosen = f"{only}-{device}" if only else every
        if is_dry:
            chosen += f" and {_DRY_TESTS}"
        # Each test compiles what it runs, for which there are cores: one goes on while others launch.
        workers, of_older = (1, 1) if is_dry else (max(cores - 6, 2), 2)
        tests = [suite(*_TESTS, "-k", chosen, limit_s=150.0, workers=workers)]
        if stage == "cuda":  # the first of these wait until the driver has compiled the code
            tests.append(suite(f"--archs={OLDER}", *_TESTS, "-k", chosen, limit_s=240.0, workers=of_older))
        if not is_dry:
            tests.append(suite("benchmarks/gpu/sanitizer.py", limit_s=240.0, workers=3))
        result["tests"] = Part(tests, to_compile() if stage == "cuda" else None, share=0.7 if only else 1.0)
    if stage == "bench":
        result["tiles"] = Part([suite("benchmarks/gpu/tiles.py", limit_s=600.0)], share=0.4)
    if stage != "truth":
        speed = "benchmarks/gpu/speed.py"  # whose largest shapes take fp64 and the plain formula some seconds
        result["times"] = Part([suite(speed, "-k", "not compile", limit_s=90.0)], to_compile(speed, "-k", "compile"))
    return result


def run_stage(stage: str, device: str, path: Path, about: dict[str, str], seconds: float) -> None:
    """Runs what is left to do in a stage, and records it at that path.

    Args:
        device: "cuda"; or "cpu" for a dry run.
        about: the versions of everything.
        seconds: how long it may take.

    Raises:
        StageError: the backend refuses this GPU, something is wrong, or time did not suffice.
        StartError: a process cannot start.
    """
    deadline, hashed, unfinished = time.time() + seconds, sources(), []
    if device == "cuda" and (only := only_of(stage, device)) and (why := _refusal(only, device)):
        raise StageError(f"{only} {why}")
    for name in ("TORCH_CUDA_ARCH_LIST", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):  # containers come with them
        os.environ.pop(name, None)
    begin = {"stage": stage, "date": now(), "sources": hashed, "device": device, "machine": machine(device)}
    append(path, {"begin": begin | {"versions": about, "state_before": gpu_state(device)}})
    if timed := {row["kernel"]: row["times"] for row in _rows(path, stage, hashed) if "times" in row}:
        # This machine may be another one than that which timed the tiles.
        tune.keep_faster_tiles(torch.device(device), timed)
    for name, part in parts(stage, device).items():
        until, mark = deadline - (1 - part.share) * seconds, f"all {name}"
        if mark in finished(path, stage, hashed):
            continue
        if part.to_compile:
            left = max(until - time.time(), 0.0)
            _compile(part.to_compile, path, stage, hashed, until - (1 - _COMPILING_SHARE) * left)
        if run(part.suites, path, stage, hashed, until):
            append(path, {"stage": stage, "test": mark, "sources": hashed, "rows": []})
        else:
            unfinished.append(name)
    append(path, {"end": {"state_after": gpu_state(device), "complete": not unfinished}})
    rows = _rows(path, stage, hashed)
    if failed := [_line(row) for row in rows if is_failure(row)]:
        raise StageError("\n  ".join([f"{len(failed)} of {len(rows)} rows are failures:", *failed[:20]]))
    if unfinished:
        raise StageError(f"there was no time left for {', '.join(unfinished)}; the same command goes on there")


def _compile(suite: Suite, path: Path, stage: str, hashed: str, deadline: float) -> None:
    """Fills the caches of compilers. What fails here fails again where it is measured, but for the CUDA module."""
    known = finished(path, stage, hashed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(path, folder))
        run([suite], copy, stage, hashed, deadline)
        for row in _rows(copy, stage, hashed) if stage == "cuda" else ():
            if row["test"] not in known and is_failure(row):
                raise StageError(f"the module was not built: {_line(row)}")


def _rows(path: Path, stage: str, hashed: str) -> list[Row]:
    return [row for row in load(path)["rows"] if (row["stage"], row["sources"]) == (stage, hashed)]


def _line(row: Row) -> str:
    return f"{row['test']}: {row['verdict']}: {row['note']}"


def _refusal(name: str, device: str) -> str:
    """What a backend has against the plainest call on a device; "" where it takes it."""
    inputs, backend = make_inputs(CASES[0], torch.float16, device), backend_by_name(name)
    refusals = backend.unsupported(inputs.q, inputs.k, inputs.v, inputs.spec())
    if not refusals and backend is not cuda:  # which is built first
        return backend.unavailable(inputs.q.device) or ""
    return "; ".join(refusals)
