"""Which problems are timed: cases of testing.CASES, with their inputs, right answers and useful work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.testing import CASES, Case, Inputs, exact, make_inputs, naive

PASSES = ("forward", "backward")
LEVELS = ("attention", "layer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A layer is timed where attention is a visible part of it and the rivals' [n_q, n_k] tables still fit a laptop.
_LAYER_SHAPES = ("L128", "L512")
# Useful operations over those of a forward pass: of attention, and of a layer's projections.
_WORK = {"forward": (1.0, 1.0), "backward": (2.5, 2.0), "forward+backward": (3.5, 3.0)}
_QUICK = ("attention L128-none", "attention L128-both", "attention L512-pad", "layer L128-pad")


@dataclass(frozen=True)
class Job:
    """One group of figures: what is computed, in which dtype, and which pass of it is timed.

    level: "attention" (the operation alone) or "layer" (with the projections around it); the two are never compared.
    dtype: a name from DTYPES.
    timed: "forward", "backward" (alone) or "forward+backward".
    """

    level: str
    case: Case
    dtype: str
    timed: str

    def __str__(self) -> str:
        return f"{self.level} {self.case} {self.dtype} {self.timed}"


def jobs(dtypes: list[str], quick: bool = False, words: str = "") -> list[Job]:
    """Every job of the standard suite, or those of a quick look, whose name contains all of these words."""
    every = [
        Job(level, case, dtype, timed)
        for level in LEVELS
        for case in CASES
        for dtype in dtypes
        for timed in PASSES
        if case.timed == "standard" and (level == "attention" or case.name.startswith(_LAYER_SHAPES))
    ]
    quick_ones = [job for job in every if f"{job.level} {job.case}" in _QUICK]
    return [job for job in (quick_ones if quick else every) if has_words(job, words)]


def has_words(named: object, words: str) -> bool:
    """Whether every one of these words is in the name of a job."""
    return all(word in str(named) for word in words.split())


def visible_pairs(inputs: Inputs) -> int:
    """How many pairs of query and key the mask lets through, summed over batch and heads: the useful work."""
    B, H, n_q, _ = inputs.q.shape
    n_k = inputs.k.shape[2]
    keep = inputs.mask.keep(n_q, n_k, inputs.q.device)
    return int(keep.expand(-1, H, -1, -1).sum()) * (B // keep.shape[0])


@dataclass(frozen=True)
class Problem:
    """The tensors of a job and what is right for them.

    inputs: attention's own inputs; NaN stands in what padding hides.
    weights: of the layer, by their name in torch.nn.MultiheadAttention; empty at the attention level.
    x, do: the layer's input and the gradient of its output, [B, L, H * D]; None at the attention level.
    exact, naive: the output "o" and each gradient, in fp64 and by the plain formula in the job's dtype.
    heads: those that exact and naive hold; None where they hold all there is.
    flops: useful floating-point operations of the timed pass: 4 * pairs * D forward and 2.5 times that backward, and
        for a layer its four projections (twice as much backward).
    """

    job: Job
    inputs: Inputs
    exact: dict[str, Tensor]
    naive: dict[str, Tensor]
    flops: float
    weights: dict[str, Tensor]
    x: Tensor | None = None
    do: Tensor | None = None
    heads: list[int] | None = None


def make_problem(job: Job, device: str, outer_heads: bool = False) -> Problem:
    """The problem of a job on that device; the same tensors each time.

    Args:
        outer_heads: that only the first and the last head of attention are to be checked, since fp64 takes long.
    """
    work, projection_work = _WORK[job.timed]
    if job.level == "attention":
        inputs, right, plain, heads = _checked_attention(job.case, job.dtype, device, outer_heads)
        flops = 4.0 * visible_pairs(inputs) * inputs.q.shape[3] * work
        return Problem(job, inputs, right, plain, flops, {}, heads=heads)

    inputs = _inputs(job.case, job.dtype, device)
    flops = 4.0 * visible_pairs(inputs) * inputs.q.shape[3] * work
    x, do, weights = _layer_tensors(inputs)
    double = {name: value.double() for name, value in weights.items()}
    tokens, width = x.shape[0] * x.shape[1], x.shape[2]
    flops += 2.0 * tokens * 4 * width**2 * projection_work
    H, keep = inputs.q.shape[1], inputs.mask.keep(x.shape[1], x.shape[1], x.device)
    return Problem(
        job,
        inputs,
        exact=_layer_results(x.double(), do.double(), double, H, keep),
        naive=_layer_results(x, do, weights, H, keep),
        flops=flops,
        weights=weights,
        x=x,
        do=do,
    )


def naive_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention in three lines, [B, H, n_q, d_v]; NaN for a query that may see nothing."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
    return weights @ v


def naive_layer(x: Tensor, weights: dict[str, Tensor], H: int, keep: Tensor) -> Tensor:
    """Self-attention between its projections, [B, L, H * D], from weights named as in torch.nn.MultiheadAttention."""
    projected = F.linear(x, weights["in_proj_weight"], weights["in_proj_bias"])
    q, k, v = projected.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    o = naive_attention(q, k, v, keep).transpose(1, 2).flatten(2)
    return F.linear(o, weights["out_proj.weight"], weights["out_proj.bias"])


def _inputs(case: Case, dtype: str, device: str) -> Inputs:
    inputs = make_inputs(case, DTYPES[dtype], device)
    return replace(inputs, dlse=torch.zeros_like(inputs.dlse))  # SDPA has no lse, so no gradient comes through it


@functools.lru_cache(maxsize=2)  # the passes of a case follow each other; some meet another case
def _checked_attention(
    case: Case, dtype: str, device: str, outer_heads: bool
) -> tuple[Inputs, dict[str, Tensor], dict[str, Tensor], list[int] | None]:
    """The inputs, exact and naive results, and the heads that these hold (None: all)."""
    inputs = _inputs(case, dtype, device)
    if case.dropout_p:  # which weights are dropped depends on the number of the head
        return inputs, exact(inputs), naive(inputs), None
    heads = [0, case.H - 1] if outer_heads else list(range(case.H))
    return inputs, _head_by_head(exact, inputs, heads), _head_by_head(naive, inputs, heads), heads


def _head_by_head(
    compute: Callable[[Inputs], dict[str, Tensor]], inputs: Inputs, heads: list[int]
) -> dict[str, Tensor]:
    """compute(inputs), one head at a time: the fp64 tables [n_q, n_k] of all heads at once would not fit."""

    def each_head() -> Iterator[Inputs]:
        for h in heads:
            parts = {name: getattr(inputs, name)[:, h : h + 1] for name in ("q", "k", "v", "do", "dlse")}
            yield replace(inputs, **parts)

    results = [compute(head) for head in each_head()]
    return {name: torch.cat([result[name] for result in results], 1) for name in ("o", "dq", "dk", "dv")}


def _layer_tensors(inputs: Inputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x and do [B, L, H * D], and the weights, in the dtype and on the device of the inputs."""
    B, H, L, D = inputs.q.shape
    E = H * D
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(inputs.q)

    weights = {
        "in_proj_weight": normal(3 * E, E, std=E**-0.5),
        "in_proj_bias": normal(3 * E, std=0.1),
        "out_proj.weight": normal(E, E, std=E**-0.5),
        "out_proj.bias": normal(E, std=0.1),
    }
    return normal(B, L, E), normal(B, L, E), weights


def _layer_results(x: Tensor, do: Tensor, weights: dict[str, Tensor], H: int, keep: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x} | weights
    leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
    o = naive_layer(leaves["x"], leaves, H, keep)
    gradients = torch.autograd.grad(o, list(leaves.values()), do)
    return {"o": o.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
