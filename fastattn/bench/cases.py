"""The problems that are timed: cases of testing.CASES, with their inputs, right answers and useful work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.testing import CASES, Case, Inputs, exact, make_inputs, naive

PASSES = ("forward", "backward")
LEVELS = ("attention", "layer")  # of the standard suite
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A layer is timed where attention is a visible part of it and the rivals' [n_q, n_k] tables still fit a laptop.
_LAYER_SHAPES = ("L128", "L512")
ENCODER_LAYERS = 12
# Useful operations over those of a forward pass: of attention, and of a layer's projections.
_WORK = {"forward": (1.0, 1.0), "backward": (2.5, 2.0), "forward+backward": (3.5, 3.0)}
_QUICK = {
    "forward": ("attention L128-none", "attention L128-both", "attention L512-pad", "layer L128-pad"),
    "backward": ("attention L128-both", "attention L512-pad"),
}


@dataclass(frozen=True)
class Job:
    """One group of figures: the computation, its dtype, and the pass of it that is timed.

    level: "attention" (the operation alone), "layer" (with the projections around it) or "encoder" (ENCODER_LAYERS of
        torch.nn.TransformerEncoderLayer); figures of two levels are never compared.
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
    """The jobs of the standard suite, or of its quick form, whose names contain all of these words."""
    every = [
        Job(level, case, dtype, timed)
        for level in LEVELS
        for case in CASES
        for dtype in dtypes
        for timed in PASSES
        if case.timed == "standard" and (level == "attention" or case.name.startswith(_LAYER_SHAPES))
    ]
    quick_ones = [job for job in every if f"{job.level} {job.case}" in _QUICK[job.timed]]
    return [job for job in (quick_ones if quick else every) if has_words(job, words)]


def has_words(named: object, words: str) -> bool:
    """Whether every one of these words is in the name of a job."""
    return all(word in str(named) for word in words.split())


def visible_pairs(inputs: Inputs) -> int:
    """The number of visible pairs of query and key, summed over batch and heads: the useful work."""
    B, H, n_q, _ = inputs.q.shape
    n_k = inputs.k.shape[2]
    keep = inputs.mask.keep(n_q, n_k, inputs.q.device)
    return int(keep.sum()) * (H // keep.shape[1]) * (B // keep.shape[0])


def least_bytes(inputs: Inputs, timed: str) -> float:
    """The least bytes that a pass of attention moves: each tensor once, without the rows that padding hides."""

    def size(x: Tensor, rows: Tensor | None) -> float:
        return x.nbytes * (1.0 if rows is None else rows.float().mean().item())

    queries, keys = inputs.mask.readable_queries(), inputs.mask.readable_keys()
    bias = inputs.options["bias"].nbytes if "bias" in inputs.options else 0
    q, o = size(inputs.q, queries), size(inputs.do, queries)
    k_and_v = size(inputs.k, keys) + size(inputs.v, keys)
    return (q + k_and_v + o + bias) * {"forward": 1, "backward": 2, "forward+backward": 3}[timed]


@dataclass(frozen=True)
class Problem:
    """The tensors of a job, and the right results.

    inputs: the inputs of attention, with NaN in padding.
    weights: the weights of the layer, by their name in torch.nn.MultiheadAttention; empty at the attention level.
    x, do: the layer's input and the gradient of its output, [B, L, H * D]; None at the attention level.
    exact, naive: the output "o" and each gradient, in fp64 and by the plain formula in the job's dtype.
    key_heads: the key heads that exact and naive hold, with their query heads; None for all heads.
    unseeing: bool [B, n_q], True for queries that see nothing: fastattn gives 0 there, and rivals are not compared.
    flops: useful floating-point operations of the timed pass: 4 * pairs * D forward and 2.5 times that backward, and
        for a layer its four projections (twice as much backward), for an encoder all its products.
    """

    job: Job
    inputs: Inputs
    exact: dict[str, Tensor]
    naive: dict[str, Tensor]
    flops: float
    weights: dict[str, Tensor]
    x: Tensor | None = None
    do: Tensor | None = None
    key_heads: list[int] | None = None
    unseeing: Tensor | None = None

    def checked(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of these results that exact and naive hold."""
        compared = {name: x for name, x in results.items() if name in self.exact}
        if self.key_heads is None:
            return compared
        grouped = self.inputs.q.shape[1] // self.inputs.k.shape[1]
        of_queries = [grouped * h + i for h in self.key_heads for i in range(grouped)]
        heads = {"dk": self.key_heads, "dv": self.key_heads}
        return {name: x[..., heads.get(name, of_queries), :, :] for name, x in compared.items()}


def make_problem(job: Job, device: str, outer_heads: bool = False, drawn_there: bool = False) -> Problem:
    """The problem of a job on that device; the same tensors each time.

    Args:
        outer_heads: check only the first and the last head of attention, since fp64 takes long.
        drawn_there: as in `make_inputs`.
    """
    work, projection_work = _WORK[job.timed]
    if job.level == "attention":
        inputs, right, plain, heads = _checked_attention(job.case, job.dtype, device, outer_heads, drawn_there)
        flops = 4.0 * visible_pairs(inputs) * inputs.q.shape[3] * work
        return Problem(job, inputs, right, plain, flops, {}, key_heads=heads, unseeing=_unseeing(inputs))

    inputs = inputs_of(job.case, job.dtype, device, drawn_there)
    if job.level == "encoder":
        return _encoder_problem(job, inputs)
    inputs = replace(inputs, mask=replace(inputs.mask, real_queries=None))  # a layer projects every token
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


def naive_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention in a few lines, [B, H, n_q, d_v]; NaN for a query that may see nothing."""
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
    return weights @ v


def naive_layer(x: Tensor, weights: dict[str, Tensor], H: int, keep: Tensor) -> Tensor:
    """Self-attention between its projections, [B, L, H * D], from weights named as in torch.nn.MultiheadAttention."""
    projected = F.linear(x, weights["in_proj_weight"], weights["in_proj_bias"])
    q, k, v = projected.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    o = naive_attention(q, k, v, keep).transpose(1, 2).flatten(2)
    return F.linear(o, weights["out_proj.weight"], weights["out_proj.bias"])


def make_encoder(problem: Problem) -> nn.TransformerEncoder:
    """The encoder of a problem, with its weights."""
    encoder = _encoder_on_meta(problem.inputs).to_empty(device=problem.x.device).to(problem.x.dtype)
    encoder.load_state_dict(problem.weights)
    return encoder


def _encoder_on_meta(inputs: Inputs) -> nn.TransformerEncoder:
    _, H, _, D = inputs.q.shape
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "device": "meta"}
    layer = nn.TransformerEncoderLayer(H * D, H, 4 * H * D, **options)
    return nn.TransformerEncoder(layer, ENCODER_LAYERS, enable_nested_tensor=False)


def run_encoder(encoder: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    """The output of the encoder for x [B, L, E], 0 where `padding` is True."""
    return encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)


def _encoder_problem(job: Job, inputs: Inputs) -> Problem:
    """The problem of an encoder; only the output and the gradient of x are checked, since every layer affects both."""
    B, H, L, D = inputs.q.shape
    generator = torch.Generator().manual_seed(0)
    shapes = {name: x.shape for name, x in _encoder_on_meta(inputs).state_dict().items()}

    def initial(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 2:
            return torch.randn(shape, generator=generator) * shape[1] ** -0.5
        return torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)

    weights = {name: initial(name, shape).to(inputs.q) for name, shape in shapes.items()}
    x, do = (torch.randn(B, L, H * D, generator=generator).to(inputs.q) for _ in range(2))
    padding = ~inputs.mask.real_keys

    problem = Problem(job, inputs, {}, {}, 0.0, weights, x=x, do=do)

    def results(dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = x.to(dtype).detach().requires_grad_()
        o = run_encoder(make_encoder(problem).to(dtype), leaf, padding)
        return {"o": o.detach(), "dx": torch.autograd.grad(o, leaf, do.to(dtype))[0]}

    work, projection_work = _WORK[job.timed]
    in_products = sum(shape.numel() for shape in shapes.values() if len(shape) == 2)
    flops = 4.0 * visible_pairs(inputs) * D * work * ENCODER_LAYERS
    flops += 2.0 * int(inputs.mask.real_keys.sum()) * in_products * projection_work
    return replace(problem, exact=results(torch.float64), naive=results(x.dtype), flops=flops)


def _unseeing(inputs: Inputs) -> Tensor | None:
    """bool [B, n_q], True for queries that see nothing; None where the mask cannot leave one without keys."""
    if inputs.mask.features() <= {"causal"}:
        return None
    keep = inputs.mask.keep(inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)
    return ~keep.any(-1).any(1).expand(inputs.q.shape[0], -1)


def inputs_of(case: Case, dtype: str, device: str, drawn_there: bool = False) -> Inputs:
    """Attention's inputs of a case."""
    inputs = make_inputs(case, DTYPES[dtype], device, drawn_there=drawn_there)
    return replace(inputs, dlse=torch.zeros_like(inputs.dlse))  # SDPA has no lse, so no gradient comes through it


@functools.lru_cache(maxsize=2)  # the passes of a case follow each other; some meet another case
def _checked_attention(
    case: Case, dtype: str, device: str, outer_heads: bool, drawn_there: bool
) -> tuple[Inputs, dict[str, Tensor], dict[str, Tensor], list[int] | None]:
    """The inputs, exact and naive results, and the key heads that these hold (None: all)."""
    inputs = inputs_of(case, dtype, device, drawn_there)
    if case.dropout_p:  # which weights are dropped depends on the number of the head
        return inputs, exact(inputs), naive(inputs), None
    H_kv = inputs.k.shape[1]
    heads = sorted({0, H_kv - 1}) if outer_heads else list(range(H_kv))
    return inputs, _head_by_head(exact, inputs, heads), _head_by_head(naive, inputs, heads), heads


def _head_by_head(
    compute: Callable[[Inputs], dict[str, Tensor]], inputs: Inputs, key_heads: list[int]
) -> dict[str, Tensor]:
    """compute(inputs), one key head at a time: the fp64 tables [n_q, n_k] of all heads at once would not fit."""
    grouped, results = inputs.q.shape[1] // inputs.k.shape[1], []
    for h in key_heads:
        of_queries = slice(grouped * h, grouped * (h + 1))
        parts = {name: getattr(inputs, name)[:, of_queries] for name in ("q", "do", "dlse")}
        parts |= {name: getattr(inputs, name)[:, h : h + 1] for name in ("k", "v")}
        options = dict(inputs.options)
        if "bias" in options:  # with a head dim in the cases that are timed
            options["bias"] = options["bias"][..., of_queries, :, :]
        results.append(compute(replace(inputs, **parts, options=options)))
    return {name: torch.cat([result[name] for result in results], -3) for name in results[0] if name != "lse"}


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
