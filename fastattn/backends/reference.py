"""The executable spec: attention forward and backward in plain torch, for any dtype and every feature.

It allocates [B, H, n_q, n_k] and is written to be read. Everything else in this package is held to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import FEATURES, Spec, accumulation_dtype, empty_output

NAME = "reference"
WHERE = "everywhere, in O(n_q n_k) memory"


def features(device: torch.device) -> frozenset[str]:
    """Every feature, on every device."""
    return FEATURES


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """No objections: every floating dtype and every head dim is computed."""
    return []


def lacks(device: torch.device) -> frozenset[str]:
    """The functions of pages: the reference has all others, on every device."""
    return frozenset({"forward_paged", "forward_quantized"})


def unavailable(device: torch.device) -> str | None:
    """Never."""
    return None


def by_name_only(device: torch.device) -> str | None:
    """Never: it serves whatever the fused backends refuse."""
    return None


def exactly(function: Callable) -> Callable:
    """`function` without autocast, in which products of fp32 would be of bf16: what it is to cast is cast by then."""

    @functools.wraps(function)
    def of_these_dtypes(*args):
        if not torch._C._is_any_autocast_enabled() or torch.compiler.is_compiling():  # as for ONNX, op by op
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)

    return of_these_dtypes


class Softmax(NamedTuple):
    """The softmax of some query rows, with what its derivatives need; R is the number of rows.

    p: weights before dropout, [B, H, R, n_k], 0 where hidden.
    p_sink: weight of the sink, [B, H, R, 1], or None.
    lse: [B, H, R], -inf where a query sees nothing.
    d_score: derivative of the score by scale * q k^T, [B, H, R, n_k], or None for 1.
    distance: |position_q - position_k|, [B or 1, 1, R, n_k].
    kept: factor that dropout puts on each weight, [B, H, R, n_k], or None for 1.
    """

    p: Tensor
    p_sink: Tensor | None
    lse: Tensor
    d_score: Tensor | None
    distance: Tensor
    kept: Tensor | None

    def zero_where_nothing_is_seen(self, rows: Tensor) -> Tensor:
        """`rows` [B, H, R, D], but 0 where the query sees nothing: 0 times a NaN that others see is none."""
        return rows.masked_fill((self.lse == -math.inf)[..., None], 0)

    def dropped(self, weights: Tensor) -> Tensor:
        """`weights` after dropout."""
        return weights if self.kept is None else weights * self.kept


def softmax(q: Tensor, k: Tensor, spec: Spec, rows: slice = slice(None)) -> Softmax:
    """The weights of these query rows, in plain differentiable torch.

    Args:
        q: [B, H, n_q, D], k: [B, H, n_k, D], as `readable` returns them.
        rows: which of the n_q queries to compute.
    """
    mask, (B, H, n_q, _), n_k = spec.mask, q.shape, k.shape[2]
    scores = q[:, :, rows] @ k.mT * spec.scale
    d_score = None
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores, d_score = spec.softcap * capped, 1 - capped**2
    if spec.bias is not None:
        scores = scores + spec.bias_rows(n_k, rows).to(scores.dtype)
    position_q, position_k = mask.positions(n_q, n_k, q.device)
    distance = (position_q[:, rows, None] - position_k[:, None, :]).abs()[:, None]
    if spec.alibi_slopes is not None:
        scores = scores - spec.alibi_slopes.to(scores.dtype)[..., None, None] * distance
    scores = scores.masked_fill(~mask.keep(n_q, n_k, q.device, rows), -math.inf)

    sink = None if spec.sinks is None else spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    m = scores.detach().amax(-1, keepdim=True) if n_k else scores.new_full((*scores.shape[:3], 1), -math.inf)
    nothing_seen = m == -math.inf
    if sink is not None:
        m = torch.maximum(m, sink.detach())
    m = m.masked_fill(nothing_seen, 0)  # else -inf - -inf
    p = torch.exp(scores - m)
    p_sink = None
    if sink is not None:
        above = (sink - m).masked_fill(sink == math.inf, 0)  # else inf - inf
        p_sink = torch.exp(above).masked_fill(nothing_seen, 0)
    total = p.sum(-1, keepdim=True) if p_sink is None else p.sum(-1, keepdim=True) + p_sink
    total = total.masked_fill(nothing_seen, 1)
    lse = (m + total.log()).masked_fill(nothing_seen, -math.inf).squeeze(-1)

    kept = None
    if spec.dropout_p > 0:
        first, stop, _ = rows.indices(n_q)
        keep = spec.dropout_keep(B, H, stop - first, n_k, (0, 0, first))
        kept = keep.to(p.dtype) / (1 - spec.dropout_p) if spec.dropout_p < 1 else torch.zeros_like(p)
    return Softmax(p / total, None if p_sink is None else p_sink / total, lse, d_score, distance, kept)


def readable(x: Tensor, rows: Tensor | None, heads: int) -> Tensor:
    """q, k, v or do for `softmax`: in the accumulation dtype, one head per query head, 0 in all that nobody may read.

    Args:
        x: [B, H or H_kv, n, D].
        rows: bool [B, n] from `Mask.readable_keys` or `Mask.readable_queries`, or None.
        heads: the number of query heads.
    """
    x = x.to(accumulation_dtype(x.dtype))
    x = x if rows is None else x.masked_fill(~rows[:, None, :, None], 0)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@exactly
def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q]."""
    out = empty_output(q, v.shape[3])
    s = _softmax(q, k, spec)
    o = s.dropped(s.p) @ readable(v, spec.mask.readable_keys(), q.shape[1])
    return out.copy_(s.zero_where_nothing_is_seen(o)), s.lse


@exactly
def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, alibi_slopes and sinks. `o` and `lse` are recomputed here, not read."""
    inputs, H = (q, k, v), q.shape[1]
    keys, queries = spec.mask.readable_keys(), spec.mask.readable_queries()
    q, k, v = readable(q, queries, H), readable(k, keys, H), readable(v, keys, H)
    s = softmax(q, k, spec)
    do = q.new_zeros(o.shape) if do is None else s.zero_where_nothing_is_seen(readable(do, None, H))
    weights = s.dropped(s.p)

    dv = weights.mT @ do
    dp = s.dropped(do @ v.mT)
    delta = (weights @ v * do).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.masked_fill(s.lse == -math.inf, 0)[..., None]
    ds = s.p * (dp - delta)  # by the score after softcap and bias
    dqk = (ds if s.d_score is None else ds * s.d_score) * spec.scale

    def sum_group(grad: Tensor, like: Tensor) -> Tensor:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
        return torch.empty_like(like).copy_(grad if keys is None else grad.masked_fill(~keys[:, None, :, None], 0))

    dbias = spec.summed_like_bias(ds).to(spec.bias.dtype) if output_mask[3] else None
    dalibi_slopes = dsinks = None
    if output_mask[4]:
        dalibi_slopes = (
            -(ds * s.distance).sum((-2, -1)).sum_to_size(spec.alibi_slopes.shape).to(spec.alibi_slopes.dtype)
        )
    if output_mask[5]:
        dsinks = -(s.p_sink * delta).sum((0, 2, 3)).to(spec.sinks.dtype)
    return (
        torch.empty_like(inputs[0]).copy_(s.zero_where_nothing_is_seen(dqk @ k)),
        sum_group(dqk.mT @ q, inputs[1]),
        sum_group(dv, inputs[2]),
        dbias,
        dalibi_slopes,
        dsinks,
    )


@exactly
def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] averaged over the heads or [B, H, n_q, n_k].

    `lse` is recomputed, not read.
    """
    s = _softmax(q, k, spec)
    p = s.dropped(s.p)
    return (p.mean(1) if average_heads else p).to(q.dtype)


@exactly
def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights before dropout, [B, H, n_k] in the accumulation dtype."""
    return _softmax(q, k, spec).p.sum(2)


@exactly
def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights before dropout of every query, and their keys: two tensors [B, H, n_q, top_k].

    The weights descend, equal ones stand in the order of their keys; the keys are int64. A query that sees fewer than
    top_k keys has the weight 0 and the key -1 in the places that are left. The weights are in the accumulation dtype:
    rounded to bf16, neighbours in the order would often be equal.
    """
    n_k = k.shape[2]
    visible = spec.mask.keep(q.shape[2], n_k, q.device)
    if spec.bias is not None:
        visible = visible & (spec.bias_rows(n_k) != -math.inf)
    p = _softmax(q, k, spec).p.masked_fill(~visible, -1)
    p = torch.nn.functional.pad(p, (0, max(top_k - n_k, 0)), value=-1)
    largest, keys = (x[..., :top_k] for x in p.sort(dim=-1, descending=True, stable=True))
    return largest.masked_fill(largest == -1, 0), keys.masked_fill(largest == -1, -1)


def _softmax(q: Tensor, k: Tensor, spec: Spec) -> Softmax:
    H = q.shape[1]
    return softmax(readable(q, spec.mask.readable_queries(), H), readable(k, spec.mask.readable_keys(), H), spec)
