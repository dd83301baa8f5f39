"""Measurement of jobs: every contender is checked against fp64 first, and only right answers are timed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fastattn.backends.build import has_terminal
from fastattn.backends.selfcheck import failures
from fastattn.testing import Error, compare

from .cases import DTYPES, Job, Problem, least_bytes, make_problem
from .rivals import Contender, RefusalError, contenders
from .third_party import third_party_contenders
from .timing import Call, CallError, Timing, interleave, matmul, peak_bytes


@dataclass(frozen=True)
class Row:
    """One contender's result in one job.

    verdict: "right" (and so timed), "wrong" (its answer is outside the error budget) or "n/a" (it refuses).
    note: the sentence that explains a verdict other than "right".
    max_error: the largest error against fp64 in any result of the pass; None where the answer cannot be compared.
    timing, gflops, matmul_share, peak_mib, speedup: None unless right. gflops counts useful work only; matmul_share is
        of torch.matmul's rate in the same rounds; speedup is over torch's fastest right rival (None without one).
    peak_mib: None too where the call failed as it was measured, after it had been timed.
    gbps: the fewest bytes that the pass of attention must move, per ns; None for layers.
    """

    job: Job
    contender: str
    family: str
    verdict: str
    note: str = ""
    timing: Timing | None = None
    max_error: float | None = None
    gflops: float | None = None
    gbps: float | None = None
    matmul_share: float | None = None
    peak_mib: float | None = None
    speedup: float | None = None

    @property
    def failed(self) -> bool:
        """Whether fastattn itself gave a wrong answer."""
        return self.family == "fastattn" and self.verdict == "wrong"


def measure_all(jobs: list[Job], device: str, quick: bool, third_party: bool = False) -> Iterator[Row]:
    """The rows of each job in turn; a progress bar on stderr, or a line for each where that is no terminal."""
    budget_s = 0.3 if quick else 5.0
    with progress(len(jobs)) as show:
        for done, job in enumerate(jobs):
            show(done, str(job))
            yield from measure(job, device, budget_s, quick, third_party)


def measure(job: Job, device: str, budget_s: float, quick: bool = False, third_party: bool = False) -> list[Row]:
    """The rows of a job, fastest first, and those that could not be timed after them.

    Args:
        quick: only the backend that would serve the call and torch's kernels are timed, and of the heads of attention
            the first and the last are checked: the right answer in fp64 takes longer than what is timed.
        third_party: libraries other than torch are contenders in attention, forward.
    """
    problem = make_problem(job, device, outer_heads=quick)
    candidates = contenders(problem, quick)
    if third_party and (job.level, job.timed) == ("attention", "forward"):
        candidates += third_party_contenders(problem.inputs)
    return measure_problem(problem, candidates, device, budget_s)


def measure_problem(problem: Problem, candidates: list[Contender], device: str, budget_s: float) -> list[Row]:
    """The rows of these contenders, as `measure` orders them."""
    job = problem.job
    calls, right, max_errors, untimed = try_out(problem, candidates)
    yardstick, yardstick_call, yardstick_flops = matmul(DTYPES[job.dtype], device)
    while True:
        try:
            timings = interleave(calls | {yardstick: yardstick_call}, budget_s, device)
            break
        except CallError as error:  # of one, which costs the others no row
            if error.name not in right:
                raise
            del calls[error.name]
            contender = right.pop(error.name)
            untimed.append(_row(job, contender, "wrong" if contender.family == "fastattn" else "n/a", str(error)))
    matmul_rate = yardstick_flops / timings[yardstick].median
    moved = least_bytes(problem.inputs, job.timed) if job.level == "attention" else None
    to_beat = min((timings[name].median for name, c in right.items() if c.family == "torch"), default=None)
    calls.clear()  # frees the graphs, whose memory is measured from nothing next
    timed = [
        Row(
            job,
            name,
            contender.family,
            "right",
            timing=timings[name],
            max_error=max_errors[name],
            gflops=problem.flops / timings[name].median / 1e9,
            gbps=None if moved is None else moved / timings[name].median / 1e9,
            matmul_share=problem.flops / timings[name].median / matmul_rate,
            peak_mib=_peak_mib(contender.whole(job.timed), device),
            speedup=None if to_beat is None else to_beat / timings[name].median,
        )
        for name, contender in right.items()
    ]
    return sorted(timed, key=lambda row: row.timing.median) + untimed


def _peak_mib(call: Call, device: str) -> float | None:
    try:
        return peak_bytes(call, device) / 2**20
    except failures():  # as where the memory of the device is full
        return None


class Tried(NamedTuple):
    """The outcome of the first call of each contender.

    calls, right, max_errors: by the name of each contender that is right, the call to time, the contender, and the
        largest error of any result (None where the answer cannot be compared).
    untimed: the rows of the other contenders.
    """

    calls: dict[str, Call]
    right: dict[str, Contender]
    max_errors: dict[str, float | None]
    untimed: list[Row]


def try_out(problem: Problem, candidates: list[Contender]) -> Tried:
    """Runs each contender once and compares its results with fp64."""
    job, tried = problem.job, Tried({}, {}, {}, [])
    for contender in candidates:
        try:
            call, results = contender.trial(job.timed)
        except RefusalError as refusal:
            failed = contender.family == "fastattn" and not contender.refusal  # it promised to compute this
            tried.untimed.append(_row(job, contender, "wrong" if failed else "n/a", str(refusal)))
            continue
        max_error = None
        if contender.is_comparable:
            if contender.family != "fastattn" and problem.unseeing is not None and "o" in results:
                results["o"] = results["o"].masked_fill(problem.unseeing[:, None, :, None], 0)
            compared = errors(problem, results)
            if why := wrong(compared):
                tried.untimed.append(_row(job, contender, "wrong", why))
                continue
            max_error = max(error.largest for error in compared)
        tried.calls[contender.name], tried.right[contender.name] = call, contender
        tried.max_errors[contender.name] = max_error
    return tried


def errors(problem: Problem, results: dict[str, Tensor]) -> list[Error]:
    """The error of each result for which the problem has the right answer."""
    checked = problem.checked(results)
    return [compare(name, x, problem.naive[name], problem.exact[name]) for name, x in checked.items()]


def wrong(compared: list[Error]) -> str:
    """A sentence on the errors outside the error budget; "" where there are none."""
    return "; ".join(str(error) for error in compared if not error.right)


def _row(job: Job, contender: Contender, verdict: str, note: str) -> Row:
    return Row(job, contender.name, contender.family, verdict, note)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A function to call with how many jobs are done and the name of the one that begins."""
    if not has_terminal() or importlib.util.find_spec("rich") is None:
        yield lambda done, name: print(f"[{done + 1}/{total}] {name}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, name: progress.update(task, completed=done, description=name)
