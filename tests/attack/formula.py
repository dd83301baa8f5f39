"""The formula of attention in plain torch, written apart from the package: what the attack holds every result to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Call:
    """The arguments of one call of `fastattn.attention`, and the gradients that arrive at o and lse.

    mask: the fields of `fastattn.Mask`. options: scale, bias, softcap, alibi_slopes and sinks, each a value or None.
    dropout_p: probability to drop a weight; kept: bool [B, H, n_q, n_k], False where it is dropped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    mask: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    dropout_p: float = 0.0
    kept: Tensor | None = None

    def learned(self) -> dict[str, Tensor]:
        """The tensors that get a gradient, by name."""
        return {"q": self.q, "k": self.k, "v": self.v} | {n: x for n, x in self.options.items() if torch.is_tensor(x)}

    def replaced(self, tensors: dict[str, Tensor]) -> Call:
        """A copy with other tensors in the place of `learned()`."""
        options = self.options | {name: x for name, x in tensors.items() if name in self.options}
        return replace(self, **{name: tensors[name] for name in "qkv"}, options=options)

    def to(self, dtype: torch.dtype) -> Call:
        """A copy whose tensors of numbers have this dtype."""
        call = self.replaced({name: x.detach().to(dtype) for name, x in self.learned().items()})
        return replace(call, do=self.do.to(dtype), dlse=self.dlse.to(dtype))


class Result(NamedTuple):
    """Results of the formula, differentiable by autograd, and their gradients as textbooks have them.

    p: the weights before dropout [B, H, n_q, n_k]. gradients: of `Call.learned()`, by the names d + name.
    """

    o: Tensor
    lse: Tensor
    p: Tensor
    weights: Tensor
    gradients: Callable[[], dict[str, Tensor]]


def ranks(ids: Tensor) -> Tensor:
    """int64 [B, n]: how many tokens before each token have its id."""
    return (ids[:, :, None] == ids[:, None, :]).tril(-1).sum(-1)


def visibility(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """seen [B, 1 or H, n_q, n_k], distance of query and key [B, 1, n_q, n_k], real queries [B, n_q], real keys."""
    mask, (B, _, n_q, _), n_k = call.mask, call.q.shape, call.k.shape[2]
    real_q, real_k = (torch.ones(B, n, dtype=torch.bool, device=call.q.device) for n in (n_q, n_k))
    at_q, at_k = (x.long().cumsum(1) - 1 for x in (real_q, real_k))
    seen = torch.ones(B, n_q, n_k, dtype=torch.bool, device=call.q.device)
    if mask.get("segment_ids"):
        ids_q, ids_k = mask["segment_ids"]
        at_q, at_k, real_q, real_k = ranks(ids_q), ranks(ids_k), ids_q >= 0, ids_k >= 0
        seen = ids_q[:, :, None] == ids_k[:, None, :]
    offset = mask.get("q_offset", 0)
    at_q = at_q + (offset[:, None] if torch.is_tensor(offset) and offset.dim() == 1 else offset)
    ahead = at_k[:, None, :] - at_q[:, :, None]
    left, right = mask.get("window", (None, None))
    right = min(0, math.inf if right is None else right) if mask.get("causal") else right
    real_q = real_q & mask.get("real_queries", True)
    real_k = real_k & mask.get("real_keys", True)
    seen = seen & real_q[:, :, None] & real_k[:, None, :]
    seen = seen if left is None else seen & (-left <= ahead)
    seen = seen if right is None else seen & (ahead <= right)
    return seen[:, None] & mask.get("dense", True), ahead.abs()[:, None], real_q, real_k


def attend(call: Call) -> Result:
    """The formula, in the dtype of the call's tensors."""
    seen, distance, real_q, real_k = visibility(call)
    (B, H, n_q, D), (_, H_kv, n_k, _) = call.q.shape, call.k.shape
    given = {"scale": None, "bias": None, "softcap": None, "alibi_slopes": None, "sinks": None} | call.options
    scale, cap, bias = given["scale"], given["softcap"], given["bias"]
    scale = max(D, 1) ** -0.5 if scale is None else scale
    q, do = (torch.where(real_q[:, None, :, None], x, 0) for x in (call.q, call.do))
    k, v = (torch.where(real_k[:, None, :, None], x, 0).repeat_interleave(H // H_kv, 1) for x in (call.k, call.v))
    scores, slope = q @ k.mT * scale, 1
    if cap is not None:
        bounded = (scores / cap).tanh()
        scores, slope = cap * bounded, (1 - bounded**2).detach()
    if bias is not None:
        seen = seen & (bias != -math.inf)
        scores = scores + bias.masked_fill(bias == -math.inf, 0)
    if given["alibi_slopes"] is not None:
        scores = scores - given["alibi_slopes"][..., None, None] * distance
    sink = scores.new_full((H,), -math.inf) if given["sinks"] is None else given["sinks"]
    seen = seen.expand(B, H, n_q, n_k)
    seeing = seen.any(-1, keepdim=True)
    counts = torch.cat([seen, seeing & (sink > -math.inf)[:, None, None]], -1)
    scores = torch.cat([scores, sink[:, None, None].expand(B, H, n_q, 1)], -1)
    m = scores.detach().masked_fill(~counts, -math.inf).amax(-1, keepdim=True).masked_fill(~seeing, 0)
    e = torch.where(counts, (torch.where(counts, scores, m) - m).exp(), 0)
    total = e.sum(-1, keepdim=True).masked_fill(~seeing, 1)
    p_all = e / total
    p = p_all[..., :n_k]
    factor = 1 if call.kept is None else call.kept.to(p.dtype) / (1 - call.dropout_p if call.dropout_p < 1 else 1)
    o, lse = p * factor @ v, (m + total.log()).masked_fill(~seeing, -math.inf)[..., 0]

    def gradients() -> dict[str, Tensor]:
        delta = (do * o).sum(-1, keepdim=True) - call.dlse[..., None].masked_fill(~seeing, 0)
        ds = p * (do @ v.mT * factor - delta)
        dqk = ds * slope * scale
        result = {
            "dq": dqk @ k,
            "dk": (dqk.mT @ q).unflatten(1, (H_kv, H // H_kv)).sum(2),
            "dv": ((p * factor).mT @ do).unflatten(1, (H_kv, H // H_kv)).sum(2),
        }
        if bias is not None:
            result["dbias"] = ds.sum_to_size(bias.shape)
        if given["alibi_slopes"] is not None:
            result["dalibi_slopes"] = -(ds * distance).sum((2, 3)).sum_to_size(given["alibi_slopes"].shape)
        if given["sinks"] is not None:
            result["dsinks"] = -(p_all[..., n_k:] * delta).sum((0, 2, 3))
        return result

    return Result(o, lse, p, p * factor, gradients)


def outputs(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """o, lse and every gradient of a call, computed in this dtype."""
    result = attend(call.to(dtype))
    return {"o": result.o, "lse": result.lse} | result.gradients()


class Error(NamedTuple):
    """Error of one output against the exact one, and its budget, as fastattn/testing.py has it."""

    output: str
    largest: float
    budget: float

    def __str__(self) -> str:
        return self.output + (f": error {self.largest:.3g}, budget {self.budget:.3g}" if self.budget else "")


def compared(
    output: str,
    actual: Tensor,
    naive: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    least: float = 0,
    lse: Tensor | None = None,
) -> Error:
    """The error of an output, whose budget is 2 max|naive - exact| + 4 eps max(|exact|, least).

    With `lse` eps is (1 + max|lse|) times as large: a weight is exp(score - lse), and lse is rounded. Where the naive
    formula overflows, a number is asked for and no more.
    """
    if actual.shape != exact.shape:
        return Error(f"{output} of shape {list(actual.shape)}, not {list(exact.shape)}", math.inf, 0.0)
    most = torch.finfo(actual.dtype).max / 2  # larger ones are one rounding away from infinity
    actual, naive, exact = actual.detach().double(), naive.detach().double(), exact.detach().double()
    known = (exact.abs() <= most) & naive.isfinite()
    if not actual[known].isfinite().all():
        return Error(f"{output} is NaN or infinite where the exact one is finite", math.inf, 0.0)
    if not (actual[exact == -math.inf] == -math.inf).all():
        return Error(f"{output} is not -inf where the exact one is", math.inf, 0.0)

    def largest(x: Tensor) -> float:
        return x.max().item() if x.numel() else 0.0

    error, tolerated = largest((actual - exact)[known].abs()), largest((naive - exact)[known].abs())
    eps = torch.finfo(dtype).eps * (1 if lse is None else 1 + largest(lse[lse.isfinite()].abs()))
    return Error(output, error, 2 * tolerated + 4 * eps * max(least, largest(exact[known].abs())))
