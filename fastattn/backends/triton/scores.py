"""Scores in base 2 from products q k^T: softcap, bias, ALiBi; and the sink, one more logit of each head."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec
from .tiles import LOG2E, Table, by_distance, entries, table

LARGEST: tl.constexpr = tl.constexpr(2.3e38)
"""Which fp32 can hold in base 2, too, beside scores."""


class Scoring(NamedTuple):
    """Terms that make scores of products; None where the call has no such term.

    scale_log2: factor on q k^T, for scores in base 2.
    softcap_log2: bound on the scores so far, in base 2.
    bias: added after that; in base e.
    slopes: [B, H, 1, 1], subtracted for each position that a key is away from the query; in base e.
    factor_log2: scale_log2 where it is positive and nothing else makes a score, not even a sink: the largest product is
        then the largest score, and is multiplied after the maximum. Else None, behind the tables: see `Rules`.
    sinks: float [H], in base e.
    headroom_log2: what is subtracted from the exponents of weights, see the function of that name; 0 where on_weights
        is given, and for fp16.
    on_weights: factor of the weights of values instead, where more than bf16 can tell would be lost of exponents, or
        huge ones would not notice: in fp32, and without a factor_log2. Else None.
    """

    scale_log2: float
    softcap_log2: float | None
    bias: Table
    slopes: Table
    factor_log2: float | None
    sinks: Tensor | None
    headroom_log2: float
    on_weights: float | None


def headroom_log2(dtype: torch.dtype) -> int:
    """By which power of two weights are lowered, so that no sum of values of `dtype` overflows before it is divided.

    The sum of the weights, of fewer than 2^31 keys, is then below 1, though each may be 2^16 times what it should be in
    rows of huge scores, see `measure`. It is the same for any number of keys: what is rounded with it would otherwise
    depend on that, and so on the longest request of a batch. Sums of values of fp16 do not overflow, and its weights
    have no exponents to spare.
    """
    return 0 if dtype == torch.float16 else 16 + 31


def scoring(spec: Spec, n_q: int, dtype: torch.dtype) -> Scoring:
    """The terms of `spec` as the kernels take them, for n_q queries and values of `dtype`."""
    scale_log2 = spec.scale * LOG2E.value
    plain = all(term is None for term in (spec.softcap, spec.bias, spec.alibi_slopes, spec.sinks))
    fp32 = torch.finfo(torch.float32)
    plain &= scale_log2 >= fp32.tiny
    headroom, in_exponent = headroom_log2(dtype), plain and dtype == torch.bfloat16
    return Scoring(
        scale_log2=scale_log2,
        softcap_log2=None if spec.softcap is None else min(max(spec.softcap * LOG2E.value, fp32.tiny), fp32.max),
        bias=by_distance(spec.bias, n_q) if spec.bias_by_distance else table(spec.bias),
        slopes=table(None if spec.alibi_slopes is None else spec.alibi_slopes[..., None, None]),
        factor_log2=scale_log2 if plain else None,
        sinks=None if spec.sinks is None else spec.sinks.contiguous(),
        headroom_log2=float(headroom) if in_exponent else 0.0,
        on_weights=None if in_exponent or headroom == 0 else 2.0**-headroom,
    )


@triton.jit
def distances(pairs):
    """Distance of each key from each query, in positions, in fp32."""
    return tl.abs(pairs[0][2] - pairs[1][2]).to(tl.float32)


@triton.jit
def scores(b_qk, pairs, scoring):
    """Scores of a tile of products q k^T before the mask, what makes them scores in base 2, and their derivative.

    The derivative is by scale * q k^T. Scores in base 2 are rounded before a maximum is subtracted: the compiler may
    merge a product with the subtraction, but not an fma, and the difference of a huge score and its own rounding is an
    exponent beyond the floats.
    """
    if scoring.factor_log2 is not None:
        return b_qk, scoring.factor_log2, 1.0
    else:
        b_s_log2, b_slope = tl.fma(b_qk, scoring.scale_log2, 0.0), 1.0
        if scoring.softcap_log2 is not None:
            b_tanh = tanh(b_s_log2 / scoring.softcap_log2)
            b_s_log2, b_slope = tl.fma(b_tanh, scoring.softcap_log2, 0.0), 1.0 - b_tanh * b_tanh
        if scoring.bias.data is not None:
            b_bias = entries(scoring.bias, pairs).to(tl.float32)
            # torch.finfo.min is no mask: where all keys of a query have it, they share its weight.
            b_finite = tl.minimum(b_bias, LARGEST, propagate_nan=tl.PropagateNan.ALL)
            b_finite = tl.maximum(b_finite, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
            b_s_log2 = tl.where(tl.abs(b_bias) == float("inf"), b_bias, b_s_log2 + b_finite * LOG2E)
        if scoring.slopes.data is not None:
            b_s_log2 -= distances(pairs) * (entries(scoring.slopes, pairs).to(tl.float32) * LOG2E)
        return b_s_log2, 1.0, b_slope


@triton.jit
def sink_log2(scoring, i_h):
    """The sink of a head, in base 2."""
    return tl.load(scoring.sinks + i_h).to(tl.float32) * LOG2E


@triton.jit
def online_softmax(b_s, scoring, b_max, b_sum):
    """(maximum, sum, weights, factor of older weights) of rows of which these scores [M, N] are added.

    The weights are 2^(factor * score - base), with those of `measure` of the new maximum.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_factor, b_base_log2 = measure(b_new_max, scoring)
    b_p = tl.exp2(tl.fma(b_s, b_factor[:, None], -b_base_log2[:, None]))
    b_rescale = rescale(b_max, b_factor, b_base_log2, scoring)
    return b_new_max, b_sum * b_rescale + tl.sum(b_p, 1), b_p, b_rescale


@triton.jit
def measure(b_max, scoring):
    """(factor, base) of rows with that largest score: a weight is 2^(factor * score - base).

    That of the largest score is 1, or 2^-headroom_log2. But the base is rounded and the product is not: from 2^29 on
    that would be an exponent of more than 16, and of 128 in the end, which is why the factor is less there. Scores that
    differ there do so by more than leaves a weight.
    """
    # A row that has seen nothing yet counts from 0, since -inf - -inf is NaN.
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    if scoring.factor_log2 is None:
        return tl.full(b_max.shape, 1.0, tl.float32), b_base
    else:
        exponent_of_huge = (127 + 28) << 23
        b_exponent = (b_base * scoring.factor_log2).to(tl.int32, bitcast=True) & 0x7F800000
        b_lowered = exponent_of_huge - tl.maximum(b_exponent, exponent_of_huge) + (127 << 23)
        b_factor = scoring.factor_log2 * b_lowered.to(tl.float32, bitcast=True)
        return b_factor, tl.fma(b_base, b_factor, scoring.headroom_log2)


@triton.jit
def rescale(b_max, b_factor, b_base_log2, scoring):
    """Factor of what was summed with this maximum, where that of a new one is measured so."""
    return tl.exp2(tl.fma(b_max, b_factor, scoring.headroom_log2) - b_base_log2)


@triton.jit
def rest_log2(b_max, b_sum, scoring):
    """What the lse of rows has in base 2 above their largest score, from the sum of their weights."""
    if scoring.factor_log2 is None:
        return tl.log2(b_sum)
    else:  # weights are measured from a rounded base
        b_factor, b_base_log2 = measure(b_max, scoring)
        return tl.log2(b_sum) - tl.fma(b_max, b_factor, -b_base_log2)


@triton.jit
def lse_log2(b_max, b_sum, scoring):
    """The lse of rows in base 2, from their largest score and the sum of their weights."""
    b_rest_log2 = rest_log2(b_max, b_sum, scoring)
    if scoring.factor_log2 is None:
        return b_max + b_rest_log2
    else:
        return tl.fma(b_max, scoring.factor_log2, b_rest_log2)


@triton.jit
def beside_sink(b_sink_log2, b_max_log2, b_sum):
    """(maximum, sum, factor of older weights) of rows to which the sink is added.

    Where the sink is the maximum its weight is 1, and not computed: compilers make one fma of the product that it is
    and the difference, which is then no 0 but what the product was rounded by, and huge for huge sinks.
    """
    b_new_max_log2 = tl.maximum(b_max_log2, b_sink_log2)
    b_rescale = tl.exp2(b_max_log2 - b_new_max_log2)
    b_weight = tl.where(b_sink_log2 >= b_max_log2, 1.0, tl.exp2(b_sink_log2 - b_new_max_log2))
    return b_new_max_log2, b_sum * b_rescale + b_weight, b_rescale


@triton.jit
def tanh(x):
    """tanh to a few units in the last place, also near 0, which the formula with exp loses.

    Source: Cephes (Moshier), tanhf.c: the polynomial and where it ends.
    """
    magnitude, square = tl.abs(x), x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    from_exp = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)  # exp2 may be inf
    return tl.where(magnitude < 0.625, x + x * square * series, tl.where(x < 0.0, -from_exp, from_exp))
