"""Forward mode and second order, in plain torch over blocks of queries, so that memory stays O(block * n_k).

Everything here follows from the tangents of attention. With the score S, the weights P = exp(S - lse) and dropout Z:

    lse' = sum(P * S') + P_sink * sink'          o' = (Z * P * (S' - lse')) v + (Z * P) v'

The gradients G of attention are linear in (do, dlse), and <G, x'> = <do, o'> + <dlse, lse'> for any direction x'. So
the derivative of G against a cotangent x' is the gradient of the right-hand side, and (o', lse') itself by (do,
dlse).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .backends.reference import readable, softmax
from .spec import Spec, accumulation_dtype, as_output

BLOCK_ELEMENTS = 2**24  # of one [B, H, rows, n_k] intermediate

Six = tuple[Tensor | None, ...]
"""One entry for each of q, k, v, bias, alibi_slopes, sinks."""


def forward_tangents(primals: Six, tangents: Six, spec: Spec) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse), [B, H, n_q, d_v] and [B, H, n_q], in the direction `tangents` (None is zero)."""
    tangents = _zeros_for_none(primals, tangents)
    blocks = [_tangents_of_rows(primals, tangents, spec, rows) for rows in _blocks(primals)]
    o_t = torch.cat([o for o, _ in blocks], 2).to(primals[0].dtype)
    return as_output(o_t, primals[0]), torch.cat([lse for _, lse in blocks], 2)


def second_order(
    do: Tensor | None, dlse: Tensor | None, primals: Six, tangents: Six, spec: Spec
) -> tuple[Tensor | None, Tensor | None, Six]:
    """Gradients of <do, o'> + <dlse, lse'> by do, dlse and each primal; (o', lse') are those of `tangents`."""
    tangents = _zeros_for_none(primals, tangents)
    present = [i for i, x in enumerate(primals) if x is not None]
    gradients = [None if x is None else torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in primals]
    ddo, ddlse = [], []
    for rows in _blocks(primals):

        def tangents_of_rows(*given: Tensor, rows: slice = rows) -> tuple[Tensor, Tensor]:
            whole = list(primals)
            for i, x in zip(present, given, strict=True):
                whole[i] = x
            return _tangents_of_rows(tuple(whole), tangents, spec, rows)

        (o_t, lse_t), pull_back = torch.func.vjp(tangents_of_rows, *(primals[i] for i in present))
        ddo.append(o_t)
        ddlse.append(lse_t)
        cotangents = (
            torch.zeros_like(o_t) if do is None else do[:, :, rows].to(o_t.dtype),
            torch.zeros_like(lse_t) if dlse is None else dlse[:, :, rows],
        )
        for i, g in zip(present, pull_back(cotangents), strict=True):
            gradients[i] = gradients[i] + g
    return (
        None if do is None else torch.cat(ddo, 2).to(do.dtype),
        None if dlse is None else torch.cat(ddlse, 2),
        tuple(None if g is None else g.to(x.dtype) for g, x in zip(gradients, primals, strict=True)),
    )


def _tangents_of_rows(primals: Six, tangents: Six, spec: Spec, rows: slice) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse) for these query rows: the formula at the top of this file."""
    spec = replace(spec, bias=primals[3], alibi_slopes=primals[4], sinks=primals[5])
    direction = replace(spec, bias=tangents[3])
    H, keys, queries = primals[0].shape[1], spec.mask.readable_keys(), spec.mask.readable_queries()
    q, k, v = (readable(x, hidden, H) for x, hidden in zip(primals[:3], (queries, keys, keys), strict=True))
    q_t, k_t, v_t = (readable(x, hidden, H) for x, hidden in zip(tangents[:3], (queries, keys, keys), strict=True))

    s = softmax(q, k, spec, rows)
    s_t = (q_t[:, :, rows] @ k.mT + q[:, :, rows] @ k_t.mT) * spec.scale
    if s.d_score is not None:
        s_t = s_t * s.d_score
    if tangents[3] is not None:
        s_t = s_t + direction.bias_rows(rows)
    if tangents[4] is not None:
        s_t = s_t - tangents[4][..., None, None] * s.distance

    lse_t = (s.p * s_t).sum(-1)
    if tangents[5] is not None:
        lse_t = lse_t + s.p_sink.squeeze(-1) * tangents[5][:, None]
    p_t = s.p * (s_t - lse_t[..., None])
    return s.dropped(p_t) @ v + s.dropped(s.p) @ v_t, lse_t


def _blocks(primals: Six) -> Iterator[slice]:
    """Slices of the query rows, small enough that a block of scores has about BLOCK_ELEMENTS elements."""
    q, k = primals[:2]
    n_q = q.shape[2]
    size = max(1, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, max(n_q, 1), size):  # one empty block where there are no queries
        yield slice(start, min(start + size, n_q))


def _zeros_for_none(primals: Six, tangents: Six) -> Six:
    return tuple(
        torch.zeros_like(x) if t is None and x is not None else t for x, t in zip(primals, tangents, strict=True)
    )
