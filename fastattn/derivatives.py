"""Forward mode and second order, in plain torch over blocks of queries, so that memory stays O(block * n_k).

Everything here follows from the tangents of attention. With the score S, the weights P = exp(S - lse) and dropout Z:

    lse' = sum(P * S') + P_sink * sink'          o' = (Z * P * (S' - lse')) v + (Z * P) v'

The gradients G of attention are linear in (do, dlse), and <G, x'> = <do, o'> + <dlse, lse'> for any direction x'. So
the derivative of G against a cotangent x' is the gradient of the right-hand side, and (o', lse') itself by (do,
dlse).

The weights as users get them, Z * P in one of the forms of `_formed`, have every derivative from here, the first too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends.reference import Softmax, readable, softmax
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
    ddo, ddlse = [], []

    def cotangents_of_rows(rows: slice, tangents_of_rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        o_t, lse_t = tangents_of_rows
        ddo.append(o_t)
        ddlse.append(lse_t)
        return (
            torch.zeros_like(o_t) if do is None else do[:, :, rows].to(o_t.dtype),
            torch.zeros_like(lse_t) if dlse is None else dlse[:, :, rows],
        )

    gradients = _pulled_back(
        primals, lambda given, rows: _tangents_of_rows(given, tangents, spec, rows), cotangents_of_rows
    )
    return (
        None if do is None else torch.cat(ddo, 2).to(do.dtype),
        None if dlse is None else torch.cat(ddlse, 2),
        gradients,
    )


def weights_gradients(d_weights: Tensor, keys: Tensor, primals: Six, spec: Spec, form: str) -> Six:
    """Gradients of <d_weights, weights> by each primal, those of v and None being None.

    Args:
        d_weights: in the shape of the weights in that form.
        keys: of the weights, in the form "top_keys".
    """

    def weights_of_rows(given: Six, rows: slice) -> Tensor:
        s = _softmax_of_rows(given, spec, rows)
        return _formed(s.dropped(s.p), form, keys, rows)

    def cotangents_of_rows(rows: slice, weights: Tensor) -> Tensor:
        return _rows_of_form(d_weights, form, rows).to(weights.dtype)

    return _pulled_back(primals, weights_of_rows, cotangents_of_rows)


def weights_tangents(keys: Tensor, primals: Six, tangents: Six, spec: Spec, form: str) -> Tensor:
    """The tangent of the weights in the direction `tangents` (None is zero). Arguments as in `weights_gradients`."""
    tangents = _zeros_for_none(primals, tangents)

    def tangents_of_rows(rows: slice) -> Tensor:
        s, p_t, _ = _softmax_tangents(primals, tangents, spec, rows)
        return _formed(s.dropped(p_t), form, keys, rows)

    blocks = [tangents_of_rows(rows) for rows in _blocks(primals)]
    return sum(blocks) if form == "received" else torch.cat(blocks, -2)


def _formed(p: Tensor, form: str, keys: Tensor, rows: slice) -> Tensor:
    """What is returned of the weights p [B, H, R, n_k] of these query rows, or of their tangents."""
    if form == "averaged":
        return p.mean(1)
    if form == "received":
        return p.sum(2)
    if form == "top_keys":
        none = p.shape[-1]  # one more key, of weight 0, for the places without one
        chosen = keys[:, :, rows]
        return pad(p, (0, 1)).gather(-1, torch.where(chosen < 0, none, chosen))
    return p


def _rows_of_form(x: Tensor, form: str, rows: slice) -> Tensor:
    """What belongs to these query rows; all of it where each adds to all."""
    return x if form == "received" else x[..., rows, :]


def _pulled_back(primals: Six, function: Callable, cotangents: Callable) -> Six:
    """The gradients of the primals through function(primals, rows), summed over blocks of query rows.

    Args:
        cotangents: of its outputs, as a function of the rows and the outputs.
    """
    present = [i for i, x in enumerate(primals) if x is not None]
    gradients = [None if x is None else torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in primals]
    for rows in _blocks(primals):

        def of_rows(*given: Tensor, rows: slice = rows) -> Tensor | tuple[Tensor, ...]:
            whole = list(primals)
            for i, x in zip(present, given, strict=True):
                whole[i] = x
            return function(tuple(whole), rows)

        outputs, pull_back = torch.func.vjp(of_rows, *(primals[i] for i in present))
        for i, g in zip(present, pull_back(cotangents(rows, outputs)), strict=True):
            gradients[i] = gradients[i] + g
    return tuple(None if g is None else g.to(x.dtype) for g, x in zip(gradients, primals, strict=True))


def _tangents_of_rows(primals: Six, tangents: Six, spec: Spec, rows: slice) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse) for these query rows: the formula at the top of this file."""
    H, keys = primals[0].shape[1], spec.mask.readable_keys()
    v, v_t = (readable(x, keys, H) for x in (primals[2], tangents[2]))
    s, p_t, lse_t = _softmax_tangents(primals, tangents, spec, rows)
    return s.dropped(p_t) @ v + s.dropped(s.p) @ v_t, lse_t


def _softmax_of_rows(primals: Six, spec: Spec, rows: slice) -> Softmax:
    """The softmax of these query rows as a function of the primals."""
    spec = replace(spec, bias=primals[3], alibi_slopes=primals[4], sinks=primals[5])
    return softmax(*_readable_products(primals, spec), spec, rows)


def _readable_products(six: Six, spec: Spec) -> tuple[Tensor, Tensor]:
    """The first two of them, whose product is the score."""
    H, mask = six[0].shape[1], spec.mask
    return readable(six[0], mask.readable_queries(), H), readable(six[1], mask.readable_keys(), H)


def _softmax_tangents(primals: Six, tangents: Six, spec: Spec, rows: slice) -> tuple[Softmax, Tensor, Tensor]:
    """The softmax of these query rows, and the tangents of its weights before dropout and of lse."""
    direction = replace(spec, bias=tangents[3])
    s = _softmax_of_rows(primals, spec, rows)
    q, k = _readable_products(primals, spec)
    q_t, k_t = _readable_products(tangents, spec)
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
    return s, s.p * (s_t - lse_t[..., None]), lse_t


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
