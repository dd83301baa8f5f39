"""Visibility of pairs of query and key, and of tiles of them: two views of one `Mask`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import FAR
from .tiles import Table, entries

if TYPE_CHECKING:
    from .preparation import KeyBlocks

LAST_POSITION: tl.constexpr = tl.constexpr(FAR)
BEYOND: tl.constexpr = tl.constexpr(2**31 - 1)
"""Further than a position and a limit reach together, in either direction."""


class Visibility(NamedTuple):
    """A `Mask` as the kernels take it; None where the mask has no such limit, which removes the code for it.

    A query at position p sees keys at p - left to p + right; causal is a `right` of 0 or less. Key j stands at j and
    query i at i + q_offset, or where the tables of positions say. What stands for q_offset is 1 for 0, and no multiple
    of 16: Triton compiles kernels of their own for such, which would come up during generation. With documents,
    `key_ranges` takes the place of the spans and of all that the limits say about tiles; see `preparation.visibility`.
    """

    real_queries: Tensor | None  # [B, n_q], 0 for padding
    query_spans: Tensor | None  # int32 [B, 3], see preparation.real_spans
    real_keys: Tensor | None  # [B, n_k]
    key_spans: Tensor | None  # int32 [B, 3]
    q_offsets: Tensor | None  # integer [B], instead; cut off at FAR, which only ALiBi and huge windows notice
    q_offset_coded: int  # 2 q_offset + 1
    left: int | None
    right: int | None
    documents_q: Tensor | None  # integer [B, n_q]
    documents_k: Tensor | None  # integer [B, n_k]
    positions_q: Tensor | None  # int32 [B, n_q]
    positions_k: Tensor | None  # int32 [B, n_k]
    dense: Table  # bool
    key_ranges: Tensor | None  # int32 [B, query tiles, 5], see `preparation.KeyBlocks`
    key_blocks: KeyBlocks | None  # what `in_tiles` makes the ranges of; None in kernels, behind the table: see `Rules`

    def in_tiles(self, block_m: int) -> Visibility:
        """Copy of this visibility for a kernel that takes `block_m` queries a tile."""
        if self.key_blocks is None:
            return self
        return self._replace(key_ranges=self.key_blocks.ranges(block_m), key_blocks=None)

    def in_key_tiles(self, block_m: int, block_n: int) -> Visibility:
        """The same for a kernel whose programs take `block_n` keys each, and cannot look for the queries they need."""
        if self.key_blocks is None:
            return self
        return self._replace(key_ranges=self.key_blocks.query_ranges(block_m, block_n), key_blocks=None)

    def spans(self) -> tuple[Tensor | None, Tensor | None]:
        """`query_spans` and `key_spans`, of documents too; to be asked before `in_tiles`."""
        return (self.query_spans, self.key_spans) if self.key_blocks is None else self.key_blocks.spans


@triton.jit
def real_tokens(o, n, real, i_b):
    """Readability of the tokens at the positions `o` of a sample: False for padding."""
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
    """Position of query 0 of a sample among the keys."""
    if visible.q_offsets is None:
        return visible.q_offset_coded >> 1
    else:
        q_offset = tl.load(visible.q_offsets + i_b)
        return tl.minimum(tl.maximum(q_offset, -LAST_POSITION), LAST_POSITION).to(tl.int32)


@triton.jit
def query_tokens(i_m, i_b, n_q, q_offset, visible, PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile of queries: (index, which may be read, position among the keys).

    PARTIAL: False for a full tile of `query_range`, which holds real queries only.
    """
    o_q = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PARTIAL:
        return queries_at(o_q, i_b, n_q, q_offset, visible)
    elif visible.positions_q is None:
        return o_q, tl.full([BLOCK_M], True, tl.int1), o_q + q_offset
    else:
        return o_q, tl.full([BLOCK_M], True, tl.int1), tl.load(visible.positions_q + i_b * n_q + o_q)


@triton.jit
def queries_at(o_q, i_b, n_q, q_offset, visible):
    """`query_tokens` for the queries of these indices."""
    m_q = real_tokens(o_q, n_q, visible.real_queries, i_b)
    if visible.positions_q is None:
        return o_q, m_q, o_q + q_offset
    else:
        return o_q, m_q, tl.load(visible.positions_q + i_b * n_q + o_q, mask=m_q, other=0)


@triton.jit
def key_tokens(i_n, i_b, n_k, visible, PARTIAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of keys: (index, which may be read, position).

    PARTIAL: False for a full tile of `key_range`, which holds real keys only.
    """
    o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if PARTIAL:
        return keys_at(o_k, i_b, n_k, visible)
    elif visible.positions_k is None:
        return o_k, tl.full([BLOCK_N], True, tl.int1), o_k
    else:
        return o_k, tl.full([BLOCK_N], True, tl.int1), tl.load(visible.positions_k + i_b * n_k + o_k)


@triton.jit
def keys_at(o_k, i_b, n_k, visible):
    """`key_tokens` for the keys of these indices."""
    m_k = real_tokens(o_k, n_k, visible.real_keys, i_b)
    if visible.positions_k is None:
        return o_k, m_k, o_k
    else:
        return o_k, m_k, tl.load(visible.positions_k + i_b * n_k + o_k, mask=m_k, other=0)


@triton.jit
def as_column(x):
    """Three things that stand along the first axis of a tile of pairs, shaped for it."""
    return x[0][:, None], x[1][:, None], x[2][:, None]


@triton.jit
def as_row(x):
    """Three things that stand along the second axis of a tile of pairs, shaped for it."""
    return x[0][None, :], x[1][None, :], x[2][None, :]


@triton.jit
def keep(pairs, visible):
    """Visibility of each key to each real query: the twin of `Mask.keep`, but for a dense mask. See `entries`.

    What it says of other queries is of no use: no kernel keeps what it computes for them. A key that may not be read
    has a position beyond the limits, so that a pair costs a comparison less; not with documents, where that would take
    more registers than there are on Hopper.
    """
    queries, keys, i_b, _, n_q, n_k = pairs
    o_q, m_q, position_q = queries
    o_k, m_k, position_k = keys
    m_keep = m_k
    if visible.documents_q is not None:
        m_keep = m_q & m_k
        behind = position_q - position_k  # how far the key lies behind the query
        if visible.left is not None:
            m_keep = m_keep & (behind <= visible.left)
        if visible.right is not None:
            m_keep = m_keep & (behind >= -visible.right)
        document_q = tl.load(visible.documents_q + i_b * n_q + o_q, mask=m_q, other=-1)
        document_k = tl.load(visible.documents_k + i_b * n_k + o_k, mask=m_k, other=-1)
        m_keep = m_keep & (document_q == document_k)
    elif visible.right is not None:
        m_keep = tl.where(m_k, position_k, BEYOND) <= position_q + visible.right
        if visible.left is not None:
            m_keep = m_keep & (position_k >= position_q - visible.left)
    elif visible.left is not None:
        m_keep = tl.where(m_k, position_k, -BEYOND) >= position_q - visible.left
    return m_keep


@triton.jit
def shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN: tl.constexpr):
    """Pairs of a tile that a dense mask shows, True without one; to be asked before the tile is read."""
    if visible.dense.data is None:
        return True  # not None, which Triton 3.6 cannot return
    elif QUERIES_DOWN:
        return entries(visible.dense, (as_column(queries), as_row(keys), i_b, i_h)) & queries[1][:, None] & keys[1]
    else:
        return entries(visible.dense, (as_row(queries), as_column(keys), i_b, i_h)) & queries[1] & keys[1][:, None]


@triton.jit
def anything(m):
    """Whether any of a tile of bools is True."""
    return tl.max(m.to(tl.int32)) > 0


@triton.jit
def hide(b_x, value, m_dense, pairs, visible, PARTIAL: tl.constexpr):
    """`b_x` with `value` for the pairs that may not be seen; in full tiles only a dense mask has such."""
    if visible.dense.data is not None:
        b_x = tl.where(m_dense, b_x, value)
    if PARTIAL:
        b_x = tl.where(keep(pairs, visible), b_x, value)
    return b_x


@triton.jit
def key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Range of the key tiles that query tile `i_m` can see: (begin, full_begin, full_end, end), as `keep` has it.

    Tiles outside [begin, end) need not be read. In those of [full_begin, full_end) every real query sees every key.
    """
    if visible.key_ranges is None:
        q_first, _, q_end = real_span(visible.query_spans, n_q, i_b)
        k_first, k_hole, k_end = real_span(visible.key_spans, n_k, i_b)
        row_first = tl.maximum(i_m * BLOCK_M, q_first)
        row_end = tl.minimum(i_m * BLOCK_M + BLOCK_M, q_end)
        return column_range(row_first, row_end, q_offset, visible.left, visible.right, k_first, k_hole, k_end, BLOCK_N)
    else:
        first, full_first, full_end, end = range_in_table(visible.key_ranges, i_b * tl.cdiv(n_q, BLOCK_M) + i_m, 5)
        return tiles_of(first, full_first, full_end, end, BLOCK_N)


@triton.jit
def query_range(i_n, i_b, q_offset, n_q, n_k, visible, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Range of the query tiles that can see key tile `i_n`: `key_range` from the side of the keys."""
    if visible.key_ranges is None:
        q_first, q_hole, q_end = real_span(visible.query_spans, n_q, i_b)
        k_first, _, k_end = real_span(visible.key_spans, n_k, i_b)
        row_first = tl.maximum(i_n * BLOCK_N, k_first)
        row_end = tl.minimum(i_n * BLOCK_N + BLOCK_N, k_end)
        # A key sees the queries that see it: the band is mirrored.
        return column_range(row_first, row_end, -q_offset, visible.right, visible.left, q_first, q_hole, q_end, BLOCK_M)
    else:
        first, end = i_n * BLOCK_N, tl.minimum(i_n * BLOCK_N + BLOCK_N, n_k)
        return tiles_that_see(first, end, visible.key_ranges, i_b, tl.cdiv(n_q, BLOCK_M))


@triton.jit
def range_in_table(ranges, i_tile, WIDTH: tl.constexpr = 4):
    """(begin, full_begin, full_end, end), as a row of a table of that width says."""
    p_range = ranges + i_tile * WIDTH
    return tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)


@triton.jit
def tiles_that_see(first, end, key_ranges, i_b, n_tiles, BLOCK: tl.constexpr = 128):
    """The query tiles that see some of the keys [first, end), as `key_range` has them: (begin, full_begin, ...)."""
    b_begin, b_full_begin = tl.full([BLOCK], n_tiles, tl.int32), tl.full([BLOCK], n_tiles, tl.int32)
    b_end = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, n_tiles, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_seen, m_full = sees(o, first, end, key_ranges, i_b, n_tiles)
        b_begin = tl.minimum(b_begin, tl.where(m_seen, o, n_tiles))
        b_full_begin = tl.minimum(b_full_begin, tl.where(m_full, o, n_tiles))
        b_end = tl.maximum(b_end, tl.where(m_seen, o + 1, 0))
    begin, full_begin, end_of_seen = tl.min(b_begin, 0), tl.min(b_full_begin, 0), tl.max(b_end, 0)
    b_full_end = tl.full([BLOCK], n_tiles, tl.int32)
    for i in tl.range(full_begin, end_of_seen, BLOCK):
        o = i + tl.arange(0, BLOCK)
        _, m_full = sees(o, first, end, key_ranges, i_b, n_tiles)
        b_full_end = tl.minimum(b_full_end, tl.where(m_full, n_tiles, o))
    full_begin = tl.minimum(full_begin, end_of_seen)
    return tl.minimum(begin, end_of_seen), full_begin, tl.minimum(tl.min(b_full_end, 0), end_of_seen), end_of_seen


@triton.jit
def sees(o, first, end, key_ranges, i_b, n_tiles):
    """Query tiles of `o` that see some of the keys [first, end), and those of real queries that all see all of them."""
    p_range, m = key_ranges + (i_b * n_tiles + o) * 5, o < n_tiles
    m_seen = (tl.load(p_range, mask=m, other=0) < end) & (tl.load(p_range + 3, mask=m, other=0) > first)
    full_first, full_end = tl.load(p_range + 1, mask=m, other=0), tl.load(p_range + 2, mask=m, other=0)
    m_real = tl.load(p_range + 4, mask=m, other=1) == 0
    return m_seen, m_seen & m_real & (full_first <= first) & (full_end >= end)


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
    seen_end = tl.where(row_first < row_end, seen_end, seen_first)
    return tiles_of(seen_first, full_first, full_end, seen_end, BLOCK)


@triton.jit
def tiles_of(first, full_first, full_end, end, BLOCK: tl.constexpr):
    """(begin, full_begin, full_end, end) in tiles: columns [first, end) where [full_first, full_end) are full."""
    tile_begin = tl.where(first < end, first // BLOCK, 0)
    tile_end = tl.where(first < end, tl.cdiv(end, BLOCK), 0)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_first, BLOCK), tile_begin), tile_end)
    full_end = tl.minimum(tl.maximum(full_end // BLOCK, full_begin), tile_end)
    return tile_begin, full_begin, full_end, tile_end


@triton.jit
def loop_bounds(tile_range, PARTIAL: tl.constexpr):
    """The (begin, end) of a loop over the full tiles of a `key_range` or `query_range`, or over the partial ones.

    Each have a loop of their own, since a branch inside of one would keep Triton from seeing that the second product
    follows from the first: scores would be spread over the warps by columns too, and meet in shared memory.
    """
    begin, full_begin, full_end, end = tile_range
    if PARTIAL:
        return begin, end - (full_end - full_begin)
    else:
        return full_begin, full_end


@triton.jit
def tile_of_step(step, tile_range, PARTIAL: tl.constexpr):
    """The tile of a step of one of these loops."""
    _, full_begin, full_end, _ = tile_range
    if PARTIAL:
        return tl.where(step < full_begin, step, step + (full_end - full_begin))
    else:
        return step


@triton.jit
def is_edge(i_tile, tile_range):
    """Whether a tile of a `key_range` or `query_range` holds pairs that may not be seen."""
    _, full_begin, full_end, _ = tile_range
    return (i_tile < full_begin) | (i_tile >= full_end)
