"""The suite "limit": how near the CPU kernels come to what the machine can do, each figure beside its target."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fastattn.backends import cpu
from fastattn.testing import CASES, ODD_HEAD_DIMS, ODD_LENGTHS

from .cases import PASSES, Job, Problem, has_words, make_problem
from .rivals import SDPA_BY_ITSELF, Contender, contenders, sdpa_by_itself
from .run import progress, try_out
from .timing import Timing, fma_ceiling, interleave

THREADS = 2  # what the targets were set for
OURS = "fastattn cpu"
_BUDGET_S = 1.5  # for all rounds of one duel
_FEW_HEADS_FROM = 2**22  # n_q * n_k, from which fp64 in every head would take longer than the timing

_LENGTHS = ("L128", "L512", "L2048", "L4096")
# At least so many times as fast as torch, by dtype, pass and mask, for each of _LENGTHS.
_SPEED_UPS = {
    ("fp32", "forward", "none"): (1.6, 1.2, 1.2, 1.2),
    ("fp32", "forward", "causal"): (2.2, 2.2, 1.4, 1.25),
    ("fp32", "forward", "pad"): (1.2, 1.2, 1.2, 1.2),
    ("fp32", "forward", "both"): (3.0, 3.0, 3.0, 3.0),
    ("fp32", "backward", "none"): (1.4, 1.4, 1.4, 1.25),
    ("fp32", "backward", "causal"): (1.7, 1.7, 1.7, 1.25),
    ("fp32", "backward", "pad"): (2.2, 2.2, 2.2, 1.8),
    ("fp32", "backward", "both"): (3.0, 3.0, 3.0, 3.0),
    ("bf16", "forward", "none"): (2.3, 2.3, 2.3, 2.3),
    ("bf16", "forward", "causal"): (2.4, 2.4, 2.4, 2.4),
    ("bf16", "forward", "pad"): (3.8, 3.8, 3.8, 3.8),
    ("bf16", "forward", "both"): (5.0, 5.0, 5.0, 5.0),
    ("bf16", "backward", "none"): (1.5, 1.5, 1.5, 1.5),
    ("bf16", "backward", "causal"): (2.0, 2.0, 2.0, 2.0),
    ("bf16", "backward", "pad"): (2.6, 2.6, 2.6, 2.6),
    ("bf16", "backward", "both"): (3.9, 3.9, 3.9, 3.9),
}
# Where the target grows with what torch wastes: it is divided by the share of all pairs that is visible.
_OVER_VISIBLE_SHARE = {("fp32", "forward", "pad")}
# At least this share of the FMA ceiling, fp32, either pass.
_CEILING_SHARES = {
    (length, mask): share
    for length, share in (("L512", 0.75), ("L2048", 0.83), ("L4096", 0.83))
    for mask in ("none", "pad")
}
_DECODING = {"fp32": 1.25, "bf16": 8.0}
_DROPOUT = 2.5
_AT_LEAST_EQUAL = 0.95  # two medians of equal calls differ by this much
_NO_PADDED_ROWS = 0.9  # of the rate of useful pairs where no row is padding
_WITHIN_A_QUARTER = 1 / 1.25  # of the time of the size padded up
_CLEARLY_FASTER = 1.05  # to be worth a note

_CASES = {case.name: case for case in CASES if case.timed}
_CAPABILITY_VARIABLE = "FASTATTN_CPU_CAPABILITY"
_ON_ARM = platform.machine() in ("aarch64", "arm64")
_WITHOUT_NATIVE_16_BIT = ("neon",) if _ON_ARM else ("avx512", "avx2", "portable")  # instruction sets, best first


@dataclass(frozen=True)
class Duel:
    """One line of the suite: a job of fastattn, its rival and its targets.

    rival: another job of fastattn; None is torch's attention on the same job, by the kernel that torch chooses.
    rival_name: the name of the rival, which says how its job differs.
    target: the least speed-up over the rival.
    ceiling_share: the least share of the FMA ceiling that the useful operations reach; None without a target.
    over_visible_share: whether `target` is still to be divided by the share of pairs that the mask shows.
    per_useful_pair: whether time is counted per visible pair, where the two jobs do not have equally many.
    fp32_arithmetic: whether instructions for 16-bit numbers may not be used.
    """

    job: Job
    target: float
    rival: Job | None = None
    rival_name: str = "torch"
    ceiling_share: float | None = None
    over_visible_share: bool = False
    per_useful_pair: bool = False
    fp32_arithmetic: bool = False

    def __str__(self) -> str:
        return f"{self.job} against {self.rival_name}"


@dataclass(frozen=True)
class Figure:
    """The outcome of a duel.

    verdict: "right", "wrong" (fastattn's answer is outside the error budget) or "n/a" (there is nothing to compare).
    note: the sentence that explains a verdict other than "right"; or which kernels of torch's were wrong, and which one
        would have been faster than the one it chose.
    instruction_set: the instruction set of fastattn's kernels.
    target: the least `ratio`.
    rival: the name of the contender that `ratio` is about.
    ratio: the speed-up over the rival.
    gflops: useful operations of fastattn per ns; `ceiling_share` is their share of the FMA ceiling in the same rounds,
        and `ceiling_gflops` that ceiling (fp32 FMAs, whatever the job's dtype).
    noise: the spread of the samples of a call, p80 / p20 - 1, the largest among both sides and the ceiling.
    """

    duel: Duel
    verdict: str
    instruction_set: str
    target: float
    note: str = ""
    rival: str = ""
    timing: Timing | None = None
    rival_timing: Timing | None = None
    ratio: float | None = None
    gflops: float | None = None
    ceiling_share: float | None = None
    ceiling_gflops: float | None = None
    noise: float | None = None

    @property
    def job(self) -> Job:
        """The job of fastattn."""
        return self.duel.job

    @property
    def contender(self) -> str:
        """The name of fastattn's contender."""
        return OURS

    @property
    def failed(self) -> bool:
        """Whether fastattn itself gave a wrong answer."""
        return self.verdict == "wrong"

    @property
    def ratio_met(self) -> bool:
        """Whether the speed-up reaches its target."""
        return self.ratio is not None and self.ratio >= self.target

    @property
    def share_met(self) -> bool | None:
        """Whether the share of the ceiling reaches its target; None without a target.

        A share above 1 does not: something else kept the machine from its ceiling, and the share has no meaning.
        """
        if self.duel.ceiling_share is None:
            return None
        return self.ceiling_share is not None and self.duel.ceiling_share <= self.ceiling_share <= 1


def jobs(dtypes: list[str] | None = None, words: str = "") -> list[Duel]:
    """Every duel of the suite, or those in these dtypes (of our job) whose name contains all of these words."""
    every = [*_against_torch(), *_against_ourselves()]
    return [duel for duel in every if (dtypes is None or duel.job.dtype in dtypes) and has_words(duel, words)]


def measure_all(duels: list[Duel], budget_s: float = _BUDGET_S) -> Iterator[Figure]:
    """The figure of each duel in turn, with progress on stderr."""
    with progress(len(duels)) as show:
        for done, duel in enumerate(duels):
            show(done, str(duel))
            yield measure(duel, budget_s)


def measure(duel: Duel, budget_s: float) -> Figure:
    """The figure of a duel: both sides are checked against fp64 first, then timed in turns beside the FMA ceiling."""
    with _instruction_set(duel) as instruction_set:
        problem, rival_problem = _problem(duel.job), duel.rival and _problem(duel.rival)
        target = duel.target
        if duel.over_visible_share:
            q, k, mask = problem.inputs.q, problem.inputs.k, problem.inputs.mask
            target /= mask.keep(q.shape[2], k.shape[2], q.device).float().mean().item()
        figure = functools.partial(Figure, duel, instruction_set=instruction_set, target=target)
        ours = try_out(problem, _ours(problem))
        if rival_problem:
            others = try_out(rival_problem, _ours(rival_problem))
            theirs = {duel.rival_name: others.calls[OURS]} if others.calls else {}
        else:
            forced = [c for c in contenders(problem) if c.family == "torch"]
            others = try_out(problem, [*sdpa_by_itself(problem), *forced])
            theirs = others.calls
        untimed = ours.untimed + others.untimed
        if wrong := [row for row in untimed if row.failed]:
            return figure("wrong", note="; ".join(f"{row.job}: {row.note}" for row in wrong))
        rival = duel.rival_name if rival_problem else SDPA_BY_ITSELF
        if not ours.calls or rival not in theirs:
            return figure("n/a", note="; ".join(f"{row.contender}: {row.note}" for row in untimed))

        yardstick, yardstick_call, yardstick_flops = fma_ceiling()
        timings = interleave(ours.calls | theirs | {yardstick: yardstick_call}, budget_s, "cpu")
        faster = [name for name in theirs if timings[name].median < timings[rival].median / _CLEARLY_FASTER]
        our_s = timings[OURS].median
        work = problem.flops / rival_problem.flops if duel.per_useful_pair else 1.0
        ceiling = yardstick_flops / timings[yardstick].median
        return figure(
            "right",
            note="; ".join(
                [f"{row.contender}: {row.note}" for row in others.untimed if row.verdict == "wrong"]
                + [f"{name}, by force: {timings[name].median * 1e3:.3g} ms" for name in faster]
            ),
            rival=rival,
            timing=timings[OURS],
            rival_timing=timings[rival],
            ratio=timings[rival].median * work / our_s,
            gflops=problem.flops / our_s / 1e9,
            ceiling_share=problem.flops / our_s / ceiling,
            ceiling_gflops=ceiling / 1e9,
            noise=max(t.percentile(80) / t.percentile(20) for t in map(timings.get, (OURS, rival, yardstick))) - 1,
        )


def _against_torch() -> Iterator[Duel]:
    for dtype in ("fp32", "bf16"):
        for length in _LENGTHS:
            for mask in ("none", "causal", "pad", "both"):
                for timed in PASSES:
                    kind = (dtype, timed, mask)
                    yield Duel(
                        _job(f"{length}-{mask}", dtype, timed),
                        _SPEED_UPS[kind][_LENGTHS.index(length)],
                        ceiling_share=_CEILING_SHARES.get((length, mask)) if dtype == "fp32" else None,
                        over_visible_share=kind in _OVER_VISIBLE_SHARE,
                    )
    for dtype, target in _DECODING.items():
        yield Duel(_job("decode", dtype, "forward"), target)
    yield Duel(_job("L512-dropout", "fp32", "forward+backward"), _DROPOUT)


def _against_ourselves() -> Iterator[Duel]:
    for length in ("L512", "L2048"):
        for timed in PASSES:
            ours, rival = _job(f"{length}-pad-queries", "fp32", timed), _job(f"{length}-pad", "fp32", timed)
            yield Duel(ours, _NO_PADDED_ROWS, rival, "padded keys alone, per pair", per_useful_pair=True)
    for timed in PASSES:
        ours, rival = (_job("L512-none", dtype, timed) for dtype in ("fp16", "bf16"))
        yield Duel(ours, _AT_LEAST_EQUAL, rival, "bf16 without native support", fp32_arithmetic=True)
    odd = [("D", "D", D, 32) for D in ODD_HEAD_DIMS] + [("N", "n_q", N, 16) for N in ODD_LENGTHS]
    for letter, field, size, multiple in odd:
        padded = (size // multiple + 1) * multiple
        for timed in PASSES:
            ours, rival_name = _job(f"{letter}{size}", "fp32", timed), f"{letter}{padded}"
            rival = replace(ours, case=replace(ours.case, name=rival_name, **{field: padded}))
            yield Duel(ours, _WITHIN_A_QUARTER, rival, rival_name)


def _job(case: str, dtype: str, timed: str) -> Job:
    return Job("attention", _CASES[case], dtype, timed)


def _problem(job: Job) -> Problem:
    (_, _, n_q, _), (_, _, n_k, _), _ = job.case.shapes()
    return make_problem(job, "cpu", outer_heads=n_q * n_k >= _FEW_HEADS_FROM)


def _ours(problem: Problem) -> list[Contender]:
    return [contender for contender in contenders(problem) if contender.name == OURS]


@contextmanager
def _instruction_set(duel: Duel) -> Iterator[str]:
    """The instruction set of fastattn's kernels, lowered within this block where the duel asks for it."""
    if not duel.fp32_arithmetic or cpu.capability() in _WITHOUT_NATIVE_16_BIT:
        yield cpu.capability()
        return
    before = os.environ.get(_CAPABILITY_VARIABLE)
    os.environ[_CAPABILITY_VARIABLE] = _WITHOUT_NATIVE_16_BIT[0]
    try:
        yield cpu.capability()
    finally:
        if before is None:
            del os.environ[_CAPABILITY_VARIABLE]
        else:
            os.environ[_CAPABILITY_VARIABLE] = before
