"""Counts of what a call executes, by kernel, beside the least that its visible pairs need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from fastattn.testing import CASES, Case, Inputs, make_inputs

from .gpu import Gpu
from .machine import Counts, Program, program

CLASSES = {  # of instructions, by what their text begins with: the first that fits
    "matrix": r"mma|wgmma\.mma",
    "global": r"(ld|st|red|atom)\.global|ld\.[busfv]\d|cp\.(reduce\.)?async\.bulk\.tensor",
    "shared": r"(ld|st)\.shared|ldmatrix|stmatrix|cp\.async\.c",
    "special": r"(ex2|lg2|rcp|sqrt|div|rsqrt|sin|cos|tanh)\.",
    "shuffle": r"(shfl|redux|vote|elect)",
    "wait": r"(bar|barrier|mbarrier|fence|cp|wgmma|setmaxnreg)\b",
    "branch": r"(bra|brx|ret|exit)\b",
    "float": r"\w+\.\S*(f32|f16|bf16)",
    "integer": r"",
}


_LONG = next(case for case in CASES if case.name == "L2048-none")
LONG = [
    _LONG,
    *(next(case for case in CASES if case.name == f"L2048-{mask}") for mask in ("causal", "pad", "both")),
    replace(_LONG, name="L2048-pad-queries", keys="right", queries=True),
    replace(_LONG, name="L2048-window", causal=True, window=(255, None)),
    replace(_LONG, name="L2048-documents", segment_ids=True),
    replace(_LONG, name="L2048-documents-causal", segment_ids=True, causal=True),
]
"""What is counted without a choice; the last four are no cases of the benchmarks."""


class Kernel(NamedTuple):
    """What one kernel of a call executed.

    macs: multiplications of its matrix instructions; needed: those of the pairs that the mask shows.
    """

    name: str
    counts: Counts
    by_class: dict[str, int]
    macs: int
    needed: int


def macs_of(text: str) -> int:
    """Multiplications of an instruction, by one warp."""
    if found := re.search(r"\bw?g?mma\S*\.m(\d+)n(\d+)k(\d+)\.", text):
        m, n, k = map(int, found.groups())
        return min(m, 16) * n * k  # of wgmma each warp does 16 rows
    return 0


def needed_of_pair(kernel: str, D: int, d_v: int) -> int:
    """Multiplications that a kernel needs for a pair of a query and a key: scores, dP, and what it sums."""
    return {
        "forward_kernel": D + d_v,
        "dk_dv_kernel": D + d_v + d_v + D,
        "dk_kernel": D + d_v + D,
        "dv_kernel": D + d_v,
        "dq_kernel": D + d_v + D,
        "fused_kernel": D + d_v + d_v + D + D,
        "dbias_kernel": D + d_v,
        "bias_gradient_kernel": D + d_v,
        "flex_attention": D + d_v,
        "flex_attention_backward": 2 * (D + d_v) + d_v + D + D,  # for dQ scores and dP anew
        "_attn_fwd": D + d_v,  # of Triton's tutorial
        "_attn_bwd": 2 * (D + d_v) + d_v + D + D,
    }.get(re.sub(r"triton_tem_fused_|_\d+$", "", kernel), 0)


def visible_pairs(inputs: Inputs) -> int:
    """How many pairs of all heads the mask shows."""
    B, H, n_q, _ = inputs.q.shape
    return int(inputs.mask.keep(n_q, inputs.k.shape[2], inputs.q.device).expand(B, H, -1, -1).sum())


def counted(gpu: Gpu, case: Case, dtype: torch.dtype, computes: Callable[[Gpu, Inputs], object]) -> Iterator[Kernel]:
    """What each kernel of the forward and the backward of one head of that case executes."""
    inputs = make_inputs(replace(case, B=1, H=1, H_kv=1), dtype)
    gpu.programs.clear()
    program.cache_clear()  # a program counts from when it was parsed
    computes(gpu, inputs)
    pairs = visible_pairs(inputs)
    for name, programs in gpu.programs.items():
        for counts, by_class, macs in map(_totals, programs):
            needed = pairs * needed_of_pair(name, inputs.q.shape[3], inputs.v.shape[3])
            yield Kernel(name, counts, by_class, macs, needed)


def _totals(of: Program) -> tuple[Counts, dict[str, int], int]:
    total, by_class, macs = Counter(), Counter(), 0
    for text, counts in of.counts():
        text = re.sub(r"^@\S+\s+", "", text)
        total.update({name: getattr(counts, name) for name in Counts.NAMES})
        by_class[next(name for name, pattern in CLASSES.items() if re.match(pattern, text))] += counts.warps
        macs += macs_of(text) * counts.warps
    return Counts(**total), dict(by_class), macs
