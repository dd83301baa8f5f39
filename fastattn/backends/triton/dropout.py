"""Dropout: which weights stay, the twin of `Spec.dropout_keep`."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec


class Dropout(NamedTuple):
    """Which weights stay. Where there is no dropout, seed is None; see `Table`.

    seed: int64 scalar. A weight stays, multiplied by `factor`, where its random word is at least `threshold`. places:
        those of `Spec`.
    """

    seed: Tensor | None
    threshold: int | None
    factor: float | None
    places: Tensor | None


def dropout(spec: Spec) -> Dropout:
    """The dropout of `spec` as the kernels take it."""
    if spec.dropout_p == 0:
        return Dropout(None, None, None, None)
    places = None if spec.places is None else spec.places.contiguous()
    if spec.dropout_p == 1:  # the threshold has no 33rd bit: what the largest word keeps, the factor removes
        return Dropout(spec.seed, 2**32 - 1, 0.0, places)
    return Dropout(spec.seed, math.floor(spec.dropout_p * 2**32), 1 / (1 - spec.dropout_p), places)


@triton.jit
def kept(o_q, i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N: tl.constexpr):
    """bool [M, N], which weights of the queries `o_q` and the key tile `i_n` stay. One Philox call is four keys."""
    o_k4 = i_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    if dropout.places is not None:
        i_b, i_h = i_b + tl.load(dropout.places), i_h + tl.load(dropout.places + 1)
        o_k4 = tl.load(dropout.places + 2 + n_q + o_k4, mask=o_k4 < tl.cdiv(n_k, 4), other=0)
        o_q = tl.load(dropout.places + 2 + o_q, mask=o_q < n_q, other=0)
    seed, threshold = tl.load(dropout.seed), tl.cast(dropout.threshold, tl.uint32)
    # [M, N / 4]; the words and the counter of tl.philox are those of spec.philox
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_k4[None, :], o_q[:, None], i_h.to(tl.int32), i_b.to(tl.int32))
    m_even, m_odd = tl.join(b_0 >= threshold, b_2 >= threshold), tl.join(b_1 >= threshold, b_3 >= threshold)
    return tl.reshape(tl.join(m_even, m_odd), [o_q.shape[0], BLOCK_N])
