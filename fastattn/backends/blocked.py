"""Attention in plain PyTorch, over blocks of heads and queries whose scores fit into the caches of a processor.

It computes what PyTorch's fused kernels lack, softcap and dropout, with the table of the mask that they take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..spec import Mask, Spec, accumulation_dtype
from .kept_results import kept
from .reference import exactly

_PAIRS = 2**17  # of a block: 512 KiB of fp32 scores
_LARGEST_KEPT = 2**28
"""Weights of a call of which one byte each, whether dropout keeps it, lies in memory until the backward is done, where
PyTorch's own function has that byte and the weight. Of longer calls it is drawn again."""
_Part = tuple[int, slice, slice]  # a sample, some of its heads, some of their queries


@exactly
def forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] and lse [B, H, n_q] without sinks; a query that sees nothing has NaN in o, and lse -inf.

    Args:
        q: [B, H, n_q, D], k: [B, H, n_k, D], v: [B, H, n_k, d_v].
        table: broadcastable to [B, H, n_q, n_k], added to the scores; or None.
    """
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    for part, keys in _blocks(q, k):
        s, _ = _scores(q, k, table, spec, part)
        m = s.amax(-1, keepdim=True)
        p = s.sub_(m).exp_()
        total = p.sum(-1, keepdim=True)
        lse[part] = (m + total.log())[..., 0]
        if spec.dropout_p > 0:
            p.mul_(_keep(p, spec, part, (*q.shape[:3], k.shape[2])))
        o[part] = (p @ v[keys].to(p.dtype)).div_(total.mul_(1 - spec.dropout_p))
    return o, lse


@exactly
def backward(
    do: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, table: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        delta: [B, H, n_q], rowsum(do * o) without what arrives at the lse.
        lse: [B, H, n_q], with sinks; inf where a query sees nothing.
    """
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for part, keys in _blocks(q, k):
        s, d_score = _scores(q, k, table, spec, part)
        p = s.sub_(lse[part][..., None]).exp_()
        b_do = do[part].to(p.dtype).div(1 - spec.dropout_p)
        dp = b_do @ v[keys].to(p.dtype).mT
        ds = p
        if spec.dropout_p > 0:
            keep = _keep(p, spec, part, (*q.shape[:3], k.shape[2]))
            dp.mul_(keep)
            ds, p = p, p * keep
        dv[keys].baddbmm_(p.mT, b_do)
        ds = dp.sub_(delta[part][..., None]).mul_(ds)
        ds = ds if d_score is None else ds.mul_(d_score)
        dq[part] = (ds @ k[keys].to(ds.dtype)).mul_(spec.scale)
        dk[keys].baddbmm_(ds.mT, q[part].to(ds.dtype), alpha=spec.scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[_Part, tuple[int, slice]]]:
    """What a block has of q, and of k."""
    (B, H, n_q, _), n_k = q.shape, max(1, k.shape[2])
    of_rows = min(max(1, n_q), max(16, _PAIRS // n_k))
    of_heads = max(1, _PAIRS // (of_rows * n_k))
    for b in range(B):
        for h in range(0, H, of_heads):
            heads = slice(h, min(h + of_heads, H))
            for i in range(0, n_q, of_rows):
                yield (b, heads, slice(i, min(i + of_rows, n_q))), (b, heads)


def _scores(q: Tensor, k: Tensor, table: Tensor | None, spec: Spec, part: _Part) -> tuple[Tensor, Tensor | None]:
    """The scores [heads, queries, n_k] of a block, and their derivative by scale * q k^T, None for 1."""
    b, heads, rows = part
    b_q, b_k = (x.to(accumulation_dtype(x.dtype)) for x in (q[part], k[b, heads]))
    s, d_score = torch.matmul(b_q * spec.scale, b_k.mT), None
    if spec.softcap is not None:
        capped = s.div_(spec.softcap).tanh_()
        s, d_score = capped * spec.softcap, 1 - capped**2
    if table is not None:
        s.add_(table.expand(*q.shape[:3], k.shape[2])[b, heads, rows])
    return s, d_score


def _keep(like: Tensor, spec: Spec, part: _Part, shape: tuple[int, ...]) -> Tensor:
    """bool [heads, queries, n_k], False where dropout removes a weight of a block."""
    if math.prod(shape) <= _LARGEST_KEPT:
        return kept(_dropout_keep, (spec.seed, spec.places), spec.dropout_p, shape)[part]
    b, heads, rows = part
    return spec.dropout_keep(1, *like.shape, (b, heads.start, rows.start))[0]


def _dropout_keep(seed: Tensor, places: Tensor | None, p: float, shape: tuple[int, ...]) -> Tensor:
    return Spec(Mask(), 1.0, dropout_p=p, seed=seed, places=places).dropout_keep(*shape)
