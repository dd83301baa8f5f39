"""Which pairs of query and key may be seen, and which tiles of them: two views of one `Mask`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Mask
from .tiles import launch

FAR = 2**29
"""Further than any sequence is long; a sum of three such distances is still below 2^31."""


class Visibility(NamedTuple):
    """A `Mask` as the kernels take it; None where the mask has no such limit, which removes the code for it.

    Query i sees keys from `i + q_start - left` to `i + q_start + right`; causal is a `right` of 0 or less.
    """

    real_queries: Tensor | None  # bool [B, n_q]
    query_spans: Tensor | None  # int32 [B, 3], see real_spans
    real_keys: Tensor | None  # bool [B, n_k]
    key_spans: Tensor | None  # int32 [B, 3]
    q_starts: Tensor | None  # integer [B], instead of q_start
    q_start: int
    left: int | None
    right: int | None


def visibility(mask: Mask) -> Visibility:
    """`mask` as the kernels take it."""
    per_sample = isinstance(mask.q_start, Tensor)
    left, right = (None if limit is None else min(limit, FAR) for limit in mask.window)
    if mask.causal:
        right = 0 if right is None else min(right, 0)
    return Visibility(
        real_queries=None if mask.real_queries is None else mask.real_queries.contiguous(),
        query_spans=real_spans(mask.real_queries),
        real_keys=None if mask.real_keys is None else mask.real_keys.contiguous(),
        key_spans=real_spans(mask.real_keys),
        q_starts=mask.q_start.contiguous() if per_sample else None,
        q_start=0 if per_sample else max(-FAR, min(mask.q_start, FAR)),
        left=left,
        right=right,
    )


def real_spans(real: Tensor | None) -> Tensor | None:
    """int32 [B, 3], found without synchronising: where real tokens begin, where the first hole is, where they end.

    Args:
        real: bool [B, n], or None for no padding.
    """
    if real is None or real.shape[1] == 0:
        return None
    B, n = real.shape
    spans = real.new_empty(B, 3, dtype=torch.int32)
    launch(spans_kernel, B, real.contiguous(), spans, n, BLOCK=4096, num_warps=8)
    return spans


@triton.jit(do_not_specialize=["n"])
def spans_kernel(real, spans, n, BLOCK: tl.constexpr):
    """One sample's row of `real_spans`."""
    i_b = tl.program_id(0).to(tl.int64)
    # Per lane first, so that each pass costs no reduction.
    b_first = tl.full([BLOCK], n, tl.int32)
    b_end = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_real = real_tokens(o, n, real, i_b)
        b_first = tl.minimum(b_first, tl.where(m_real, o, n))
        b_end = tl.maximum(b_end, tl.where(m_real, o + 1, 0))
    first = tl.min(b_first, 0)
    b_hole = tl.full([BLOCK], n, tl.int32)
    for i in tl.range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_real = real_tokens(o, n, real, i_b)
        b_hole = tl.minimum(b_hole, tl.where(m_real | (o < first), n, o))
    tl.store(spans + i_b * 3, first)
    tl.store(spans + i_b * 3 + 1, tl.min(b_hole, 0))
    tl.store(spans + i_b * 3 + 2, tl.max(b_end, 0))


@triton.jit
def real_tokens(o, n, real, i_b):
    """Which of the positions `o` of a sample hold a token that may be read."""
    m_real = o < n
    if real is not None:
        m_real = m_real & (tl.load(real + i_b * n + o, mask=m_real, other=0) != 0)
    return m_real


@triton.jit
def real_span(spans, n, i_b):
    """(first, hole, end) of a sample: its real tokens lie in [first, end), and those of [first, hole) are all real."""
    if spans is None:
        return 0, n, n
    else:
        p_span = spans + i_b * 3
        return tl.load(p_span), tl.load(p_span + 1), tl.load(p_span + 2)


@triton.jit
def position_of_first_query(visible, i_b):
    """Where query 0 of a sample stands among the keys."""
    if visible.q_starts is None:
        return visible.q_start
    else:
        return tl.load(visible.q_starts + i_b).to(tl.int32)


@triton.jit
def query_tokens(i_m, i_b, n_q, q_start, visible, BLOCK_M: tl.constexpr):
    """A tile of queries: (index, which may be read, position among the keys)."""
    o_q = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    return o_q, real_tokens(o_q, n_q, visible.real_queries, i_b), o_q + q_start


@triton.jit
def key_tokens(i_n, i_b, n_k, visible, BLOCK_N: tl.constexpr):
    """A tile of keys: (index, which may be read, position)."""
    o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return o_k, real_tokens(o_k, n_k, visible.real_keys, i_b), o_k


@triton.jit
def as_column(tokens):
    """Tokens that stand along the first axis of a tile of pairs."""
    o, m, position = tokens
    return o[:, None], m[:, None], position[:, None]


@triton.jit
def as_row(tokens):
    """Tokens that stand along the second axis of a tile of pairs."""
    o, m, position = tokens
    return o[None, :], m[None, :], position[None, :]


@triton.jit
def keep(queries, keys, visible):
    """Which of the queries may see which of the keys: the twin of `Mask.keep`. One of the two is a column."""
    _, m_q, position_q = queries
    _, m_k, position_k = keys
    m_keep = m_q & m_k
    behind = position_q - position_k  # how far the key lies behind the query
    if visible.left is not None:
        m_keep = m_keep & (behind <= visible.left)
    if visible.right is not None:
        m_keep = m_keep & (behind >= -visible.right)
    return m_keep


@triton.jit
def key_range(i_m, i_b, q_start, n_q, n_k, visible, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which key tiles the query tile `i_m` can see: (begin, full_begin, full_end, end), the other view of `keep`.

    Tiles outside [begin, end) need not be read. In those of [full_begin, full_end) every real query sees every key.
    """
    q_first, _, q_end = real_span(visible.query_spans, n_q, i_b)
    k_first, k_hole, k_end = real_span(visible.key_spans, n_k, i_b)
    row_first = tl.maximum(i_m * BLOCK_M, q_first)
    row_end = tl.minimum(i_m * BLOCK_M + BLOCK_M, q_end)
    return column_range(row_first, row_end, q_start, visible.left, visible.right, k_first, k_hole, k_end, BLOCK_N)


@triton.jit
def query_range(i_n, i_b, q_start, n_q, n_k, visible, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which query tiles can see the key tile `i_n`: `key_range` from the side of the keys."""
    q_first, q_hole, q_end = real_span(visible.query_spans, n_q, i_b)
    k_first, _, k_end = real_span(visible.key_spans, n_k, i_b)
    row_first = tl.maximum(i_n * BLOCK_N, k_first)
    row_end = tl.minimum(i_n * BLOCK_N + BLOCK_N, k_end)
    # A key sees the queries that see it: the band is mirrored.
    return column_range(row_first, row_end, -q_start, visible.right, visible.left, q_first, q_hole, q_end, BLOCK_M)


@triton.jit
def column_range(row_first, row_end, shift, before, after, first, hole, end, BLOCK: tl.constexpr):
    """The column tiles that rows [row_first, row_end) see when row r sees r + shift - before to r + shift + after.

    Only columns [first, end) are real, and those of [first, hole) are real without exception.
    """
    seen_first, seen_end = first, end  # by some row
    full_first, full_end = first, hole  # by every row
    if before is not None:
        seen_first = tl.maximum(seen_first, row_first + shift - before)
        full_first = tl.maximum(full_first, row_end - 1 + shift - before)
    if after is not None:
        seen_end = tl.minimum(seen_end, row_end + shift + after)
        full_end = tl.minimum(full_end, row_first + shift + after + 1)
    anything = (row_first < row_end) & (seen_first < seen_end)
    tile_begin = tl.where(anything, seen_first // BLOCK, 0)
    tile_end = tl.where(anything, tl.cdiv(seen_end, BLOCK), 0)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_first, BLOCK), tile_begin), tile_end)
    full_end = tl.minimum(tl.maximum(full_end // BLOCK, full_begin), tile_end)
    return tile_begin, full_begin, full_end, tile_end


@triton.jit
def is_edge(i_tile, tile_range):
    """Whether a tile of a `key_range` or `query_range` holds pairs that may not be seen."""
    _, full_begin, full_end, _ = tile_range
    return (i_tile < full_begin) | (i_tile >= full_end)
