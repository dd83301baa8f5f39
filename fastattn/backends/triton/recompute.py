"""Recomputation of a tile in the backward kernels: the weights from the lse, and the gradient of the scores."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .scores import scores
from .tiles import dot
from .visibility import hide


class Rows(NamedTuple):
    """Statistics of each query that the backward kernels need, fp32 [B, H, n_q]; computed by `compute_rows`.

    A weight is 2^(factor * (score - reference) - rest_log2), with the score and the factor of `scores`.

    reference: 0; the largest score where the rounding of the lse would show in the weights.
    rest_log2: what is missing from the lse in base 2; +inf where a query sees nothing, which makes each of its weights
        0 without a NaN.
    delta: rowsum(dO * O) - dlse.
    """

    reference: Tensor
    rest_log2: Tensor
    delta: Tensor


@triton.jit
def load_rows(rows, i_row, o_q, m_q):
    """(reference, rest_log2, delta) of the queries `o_q` of the head whose first query is number `i_row`."""
    b_reference = tl.load(rows.reference + i_row + o_q, mask=m_q, other=0.0)
    b_rest_log2 = tl.load(rows.rest_log2 + i_row + o_q, mask=m_q, other=float("inf"))
    return b_reference, b_rest_log2, tl.load(rows.delta + i_row + o_q, mask=m_q, other=0.0)


@triton.jit
def weights(b_x, b_y, b_reference, b_rest_log2, m_dense, pairs, rules, PARTIAL: tl.constexpr, PRECISION: tl.constexpr):
    """P of a tile, and the derivative of its scores: [M, N] where x is Q and y is K, [N, M] the other way round."""
    X_IS_K: tl.constexpr = b_reference.shape[0] == 1
    b_s, factor, b_slope = scores(dot(b_x, tl.trans(b_y), None, PRECISION, X_IS_K), pairs, rules.scoring)
    b_p = tl.exp2((b_s - b_reference) * factor - b_rest_log2)
    return hide(b_p, 0.0, m_dense, pairs, rules.visible, PARTIAL), b_slope


@triton.jit
def tile_gradients(
    b_x, b_y, b_dx, b_dy, rows, m_dense, m_kept, pairs, rules, PARTIAL: tl.constexpr, PRECISION: tl.constexpr
):
    """Gradients of a tile: P, P after dropout (before its factor), dS, and the derivative by scale * q k^T.

    The tile is that of `weights`; dx is dO where x is Q, and V where x is K; `rows` are shaped like the queries.
    """
    b_reference, b_rest_log2, b_delta = rows
    b_p, b_slope = weights(b_x, b_y, b_reference, b_rest_log2, m_dense, pairs, rules, PARTIAL, PRECISION)
    b_dp = dot(b_dx, tl.trans(b_dy), None, PRECISION)
    if rules.dropout.seed is not None:
        b_dp = tl.where(m_kept, b_dp * rules.dropout.factor, 0.0)
    b_ds = b_p * (b_dp - b_delta)
    b_left = b_p
    if rules.dropout.seed is not None:
        b_left = tl.where(m_kept, b_p, 0.0)
    return b_p, b_left, b_ds, b_ds * b_slope
