"""Fixtures of the benchmarks: the call of a job and a contender, checked against fp64 before it is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from fastattn.bench import cases, rivals, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test every job of its module's LEVEL, each with every contender."""
    if "contender" not in metafunc.fixturenames:
        return  # in gpu/
    level = metafunc.module.LEVEL
    jobs = cases.jobs(list(cases.DTYPES), words=level)
    metafunc.parametrize("job", jobs, ids=lambda job: f"{job.case}-{job.dtype}-{job.timed}")
    metafunc.parametrize("contender", rivals.names(level, DEVICE), ids=lambda name: name.replace(" ", "-"))


@functools.lru_cache(maxsize=1)  # the contenders of one job follow each other
def problem_of(job: cases.Job) -> cases.Problem:
    """The job's tensors and right answers."""
    return cases.make_problem(job, DEVICE)


@pytest.fixture
def time_verified(benchmark) -> Callable[[cases.Job, str], None]:
    """A function that times one contender of a job: skipped where it refuses, failed where it is wrong."""

    def time(job: cases.Job, name: str) -> None:
        problem = problem_of(job)
        (contender,) = (c for c in rivals.contenders(problem) if c.name == name)
        try:
            call, results = contender.trial(job.timed)
        except rivals.RefusalError as refusal:
            if contender.family == "fastattn" and not contender.refusal:
                raise
            pytest.skip(f"n/a: {refusal}")
        assert run.wrong(run.errors(problem, results)) == ""

        def finished() -> None:
            call.run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark.group = str(job)
        benchmark.name = name
        benchmark.extra_info["useful_flops"] = problem.flops
        with call.context():
            benchmark(finished)

    return time
