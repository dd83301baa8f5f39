"""Forward mode and second order, in plain torch over blocks of queries, so that memory stays O(block * n_k).

Everything here follows from the tangents of attention. With the score S, the weights P = exp(S - lse) and dropout Z:

    lse' = sum(P * S') + P_sink * sink'          o' = (Z * P * (S' - lse')) v + (Z * P) v'

The gradients G of attention are linear in (do, dlse), and <G, x'> = <do, o'> + <dlse, lse'> for any direction x'. So
the derivative of G against a cotangent x' is the gradient of the right-hand side, and (o', lse') itself by (do,
dlse).

The weights as users get them, Z * P in one of the forms of `_formed`, have all their derivatives from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends.reference import Softmax, exactly, readable, softmax
from .spec import Spec, accumulation_dtype, as_output

BLOCK_ELEMENTS = 2**24  # of one [B, H, rows, n_k] intermediate

Six = tuple[Tensor | None, ...]
"""One entry for each of q, k, v, bias, alibi_slopes, sinks."""


@exactly
def forward_tangents(primals: Six, tangents: Six, spec: Spec) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse), [B, H, n_q, d_v] and [B, H, n_q], in the direction `tangents` (None is zero)."""
    tangents = _accumulated(primals, tangents)
    blocks = [_tangents_of_rows(primals, tangents, spec, rows) for rows in _blocks(primals)]
    o_t = torch.cat([o for o, _ in blocks], 2).to(primals[0].dtype)
    return as_output(o_t, primals[0]), torch.cat([lse for _, lse in blocks], 2)


@exactly
def second_order(
    do: Tensor | None, dlse: Tensor | None, primals: Six, tangents: Six, spec: Spec
) -> tuple[Tensor | None, Tensor | None, Six]:
    """Gradients of <do, o'> + <dlse, lse'> by do, dlse and each primal; (o', lse') are those of `tangents`."""
    tangents = _accumulated(primals, tangents)
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
            torch.zeros_like(o_t) if do is None else _rows(do, rows).to(o_t.dtype),
            torch.zeros_like(lse_t) if dlse is None else _rows(dlse, rows),
        )
        for i, g in zip(present, pull_back(cotangents), strict=True):
            gradients[i] = gradients[i] + g
    return (
        None if do is None else torch.cat(ddo, 2).to(do.dtype),
        None if dlse is None else torch.cat(ddlse, 2),
        tuple(None if g is None else g.to(x.dtype) for g, x in zip(gradients, primals, strict=True)),
    )


@exactly
def weights_tangents(keys: Tensor, primals: Six, tangents: Six, spec: Spec, form: str) -> Tensor:
    """The tangent of the weights in the direction `tangents` (None is zero).

    Args:
        keys: of the weights, in the form "top_keys".
        primals: with None for v, like `tangents`.
    """
    tangents, blocks = _accumulated(primals, tangents), []
    for rows in _blocks(primals):
        s, p_t, _ = _softmax_tangents(primals, tangents, spec, rows)
        blocks.append(_formed(s.dropped(p_t), form, keys, rows))
    return sum(blocks) if form == "received" else torch.cat(blocks, -2)


@exactly
def weights_gradients(d_weights: Tensor, keys: Tensor, primals: Six, spec: Spec, form: str) -> Six:
    """Gradients of <d_weights, weights> by each primal. Written out, so that they have derivatives in turn.

    Args:
        d_weights: in the shape of the weights in that form. The others as in `weights_tangents`.
    """
    spec = replace(spec, bias=primals[3], alibi_slopes=primals[4], sinks=primals[5])
    q, k = _factors(primals, spec)
    H, H_kv = q.shape[1], primals[1].shape[1]
    dq, dbias, dk, dalibi_slopes, dsinks = [], [], 0, 0, 0
    for rows in _blocks(primals):
        s = softmax(q, k, spec, rows)
        dp = s.dropped(_of_each_pair(d_weights, form, keys, rows, s.p))
        dp = dp.masked_fill(s.dropped(s.p) == 0, 0)  # 0 times what arrives there, as inf from an entropy
        delta = (s.p * dp).sum(-1, keepdim=True)
        ds = s.p * (dp - delta)  # by the score after softcap and bias
        dqk = (ds if s.d_score is None else ds * s.d_score) * spec.scale
        dq.append(dqk @ k)
        of_heads = dqk.mT @ _rows(q, rows)
        dk = dk + of_heads.reshape(k.shape[0], H_kv, H // H_kv, *k.shape[2:]).sum(2)
        if spec.bias is not None:
            dbias.append(spec.summed_like_bias(ds, rows))
        if spec.alibi_slopes is not None:
            # Distances from their mean: what a row of dS sums up to, 0 but for rounding and the sink, does not matter.
            mean = (s.p * s.distance).sum(-1, keepdim=True)
            by_slope = ds * (s.distance - mean)
            if spec.sinks is not None:
                by_slope = torch.cat([by_slope, mean * delta * s.p_sink], -1)
            dalibi_slopes = dalibi_slopes - by_slope.sum((-2, -1)).sum_to_size(spec.alibi_slopes.shape)
        if spec.sinks is not None:
            dsinks = dsinks - (s.p_sink * delta).sum((0, 2, 3))
    if spec.bias is not None:
        one_for_all_queries = spec.bias.dim() < 2 or spec.bias.shape[-2] == 1
        dbias = sum(dbias) if one_for_all_queries else torch.cat(dbias, -2)
    gradients = (torch.cat(dq, 2), dk, None, dbias, dalibi_slopes, dsinks)
    return tuple(None if x is None else g.to(x.dtype) for g, x in zip(gradients, primals, strict=True))


def _formed(p: Tensor, form: str, keys: Tensor, rows: slice) -> Tensor:
    """Results that a function returns of the weights p [B, H, R, n_k] of these query rows, or of their tangents."""
    if form == "averaged":
        return p.mean(1)
    if form == "received":
        return p.sum(2)
    if form == "top_keys":
        return pad(p, (0, 1)).gather(-1, _places(_rows(keys, rows), p))
    return p


def _of_each_pair(d_weights: Tensor, form: str, keys: Tensor, rows: slice, p: Tensor) -> Tensor:
    """The gradient that arrives at the weights p of these query rows, given that at their form: `_formed` backwards."""
    d_weights = d_weights.to(p.dtype)
    if form == "top_keys":
        places = _places(_rows(keys, rows), p)
        return torch.zeros_like(pad(p, (0, 1))).scatter_add(-1, places, _rows(d_weights, rows))[..., :-1]
    pairs = of_pairs(d_weights, form, p.shape[1])
    return (pairs if form == "received" else _rows(pairs, rows)).expand_as(p)


def of_pairs(d_weights: Tensor, form: str, H: int) -> Tensor:
    """The gradient that arrives at all weights, given that at a form but "top_keys"; broadcasts to [B, H, n_q, n_k]."""
    if form == "averaged":
        return (d_weights.to(accumulation_dtype(d_weights.dtype)) / max(H, 1)).unsqueeze(1)
    return d_weights.unsqueeze(2) if form == "received" else d_weights


def _places(keys: Tensor, p: Tensor) -> Tensor:
    """Places of the weights of these keys in a row of p with one more column, which stands for no key (-1)."""
    return torch.where(keys < 0, p.shape[-1], keys)


def _tangents_of_rows(primals: Six, tangents: Six, spec: Spec, rows: slice) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse) for these query rows: the formula at the top of this file.

    Those of a query that sees nothing are 0 and stop what arrives there, so that NaN is not read either.
    """
    H, keys = primals[0].shape[1], spec.mask.readable_keys()
    v, v_t = (readable(x, keys, H) for x in (primals[2], tangents[2]))
    s, p_t, lse_t = _softmax_tangents(primals, tangents, spec, rows)
    o_t = s.dropped(p_t) @ v + s.dropped(s.p) @ v_t
    return s.zero_where_nothing_is_seen(o_t), lse_t.masked_fill(s.lse == -math.inf, 0)


def _rows(x: Tensor, rows: slice, dim: int = 2) -> Tensor:
    """These rows of x [B, H, n_q, ...]; by an operator that torch's vectorized derivatives have a rule for."""
    first, stop, _ = rows.indices(x.shape[dim])
    return x.narrow(dim, first, stop - first)


def _bias_rows(spec: Spec, n_k: int, rows: slice) -> Tensor:
    """`spec.bias_rows` of a bias that is there, by `_rows` where that would index all of it."""
    bias = spec.bias
    shared = spec.bias_by_distance or bias.dim() < 2 or bias.shape[-2] == 1
    return spec.bias_rows(n_k, rows) if shared else _rows(bias, rows, -2)


def _softmax_tangents(primals: Six, tangents: Six, spec: Spec, rows: slice) -> tuple[Softmax, Tensor, Tensor]:
    """The softmax of these query rows, and the tangents of its weights before dropout and of lse."""
    spec = replace(spec, bias=primals[3], alibi_slopes=primals[4], sinks=primals[5])
    direction = replace(spec, bias=tangents[3])
    (q, k), (q_t, k_t) = _factors(primals, spec), _factors(tangents, spec)

    s = softmax(q, k, spec, rows)
    s_t = (_rows(q_t, rows) @ k.mT + _rows(q, rows) @ k_t.mT) * spec.scale
    if s.d_score is not None:
        s_t = s_t * s.d_score
    if tangents[3] is not None:
        s_t = s_t + _bias_rows(direction, k.shape[2], rows)
    if tangents[4] is not None:
        s_t = s_t - tangents[4][..., None, None] * s.distance

    lse_t = (s.p * s_t).sum(-1)
    if tangents[5] is not None:
        lse_t = lse_t + s.p_sink.squeeze(-1) * tangents[5][:, None]
    return s, s.p * (s_t - lse_t[..., None]), lse_t


def _factors(six: Six, spec: Spec) -> tuple[Tensor, Tensor]:
    """The first two of the six, whose products are the scores."""
    H, mask = six[0].shape[1], spec.mask
    return readable(six[0], mask.readable_queries(), H), readable(six[1], mask.readable_keys(), H)


def _blocks(primals: Six) -> Iterator[slice]:
    """Slices of the query rows, small enough that a block of scores has about BLOCK_ELEMENTS elements."""
    q, k = primals[:2]
    n_q = q.shape[2]
    size = max(1, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, max(n_q, 1), size):  # one empty block where there are no queries
        yield slice(start, min(start + size, n_q))


def _accumulated(primals: Six, tangents: Six) -> Six:
    """The tangents in the accumulation dtype of q, with zeros where one is None and its primal is not."""
    dtype = accumulation_dtype(primals[0].dtype)
    return tuple(
        None if x is None else torch.zeros_like(x, dtype=dtype) if t is None else t.to(dtype)
        for t, x in zip(tangents, primals, strict=True)
    )
