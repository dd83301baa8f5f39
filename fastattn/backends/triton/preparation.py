"""Preparation of a mask for the kernels: tables of its tokens, computed on their device, nothing of which synchronises.

They are kept with the tensors that they were computed from, for the other layers of a model and for the backward.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Mask
from ..kept_results import kept
from . import FAR
from .tiles import launch, table
from .visibility import (
    LAST_POSITION,
    Visibility,
    as_column,
    as_row,
    keep,
    keys_at,
    queries_at,
    real_tokens,
    tiles_that_see,
)

BLOCK = 64
"""Tokens of which one row of a table of blocks tells the lowest and the highest document and position."""


def visibility(mask: Mask, n_q: int, n_k: int, of_padding: torch.dtype = torch.int32) -> Visibility:
    """`mask` as the kernels take it, for n_q queries and n_k keys.

    What is computed from tensors is `kept`.

    Args:
        of_padding: dtype of what tells real tokens from padding. Where a load is masked by something of 8 bits, Triton
            lays out what it loads for products of 8 bits on GPUs other than Hopper, where bool takes fewer registers.
    """
    limits_of_mask = limits(mask)
    starts = mask.q_offset if isinstance(mask.q_offset, Tensor) else None
    tensors = (starts, mask.real_queries, mask.real_keys, *(mask.segment_ids or (None, None)), mask.dense)
    return kept(_computed, tensors, *limits_of_mask, n_q, n_k, of_padding)


def _computed(
    starts: Tensor | None,
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    dense: Tensor | None,
    q_offset: int,
    left: int | None,
    right: int | None,
    n_q: int,
    n_k: int,
    of_padding: torch.dtype,
) -> Visibility:
    if documents_q is None and starts is not None and starts.dim() == 2:
        # Another start for each query, which only documents have a table for: one for all.
        documents_q, documents_k = (starts.new_zeros(len(starts), n, dtype=torch.int32) for n in (n_q, n_k))
    # Aliases: what is kept must not keep the mask's own tensors alive.
    visible = Visibility(
        real_queries=None,
        query_spans=None,
        real_keys=None,
        key_spans=None,
        q_offsets=None if starts is None or starts.dim() == 2 else starts.detach().contiguous(),
        q_offset_coded=2 * q_offset + 1,
        left=left,
        right=right,
        documents_q=None,
        documents_k=None,
        positions_q=None,
        positions_k=None,
        dense=table(None if dense is None else dense.detach()),
        key_ranges=None,
        key_blocks=None,
    )
    if documents_q is None:
        real_queries, query_spans = padding_table(real_queries, of_padding)
        real_keys, key_spans = padding_table(real_keys, of_padding)
        return visible._replace(
            real_queries=real_queries, query_spans=query_spans, real_keys=real_keys, key_spans=key_spans
        )
    queries = document_tables(documents_q, real_queries, q_offset if starts is None else starts, of_padding)
    if documents_k is documents_q and real_keys is real_queries and starts is None and q_offset == 0:
        keys = queries
    else:
        keys = document_tables(documents_k, real_keys, 0, of_padding)
    visible = visible._replace(
        real_queries=queries[1],
        real_keys=keys[1],
        q_offsets=None,
        q_offset_coded=1,
        documents_q=queries[0],
        documents_k=keys[0],
        positions_q=queries[2],
        positions_k=keys[2],
    )
    return visible._replace(key_blocks=KeyBlocks(visible, *keys[3:]))


def limits(mask: Mask) -> tuple[int, int | None, int | None]:
    """(q_offset, left, right) that fit into 32 bits and show the same pairs; 0 stands for a tensor of starts."""
    left, right = mask.window
    if mask.causal:
        right = 0 if right is None else min(right, 0)
    start = 0 if isinstance(mask.q_offset, Tensor) else mask.q_offset
    q_offset = max(-FAR, min(start, FAR))
    left = None if left is None else left - (start - q_offset)  # a limit moves along with the queries
    right = None if right is None else right + (start - q_offset)
    return q_offset, *(None if limit is None else max(-2 * FAR, min(limit, 2 * FAR)) for limit in (left, right))


def padding_table(real: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """`real` [B, n] in `dtype`, contiguous, and its `real_spans`."""
    if real is None:
        return None, None
    result = torch.empty(real.shape, dtype=dtype, device=real.device)
    return result, real_spans(real, result)


def real_spans(real: Tensor | None, copy: Tensor | None = None) -> Tensor | None:
    """int32 [B, 3]: where real tokens begin, where the first hole is, where they end.

    Args:
        real: bool or integer [B, n], or None for no padding.
        copy: contiguous [B, n], to be filled with `real`; or None.
    """
    if real is None or real.shape[1] == 0:
        return None
    B, n = real.shape
    spans = real.new_empty(B, 3, dtype=torch.int32)
    launch(spans_kernel, B, real.contiguous(), copy, spans, n, BLOCK=4096, num_warps=8)
    return spans


@triton.jit(do_not_specialize=["n"])
def spans_kernel(real, copy, spans, n, BLOCK: tl.constexpr):
    """One sample's row of `real_spans`."""
    i_b = tl.program_id(0).to(tl.int64)
    # Per lane first, so that each pass costs no reduction.
    b_first = tl.full([BLOCK], n, tl.int32)
    b_end = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_real = real_tokens(o, n, real, i_b)
        if copy is not None:
            tl.store(copy + i_b * n + o, m_real.to(copy.dtype.element_ty), mask=o < n)
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


def document_tables(
    ids: Tensor, real: Tensor | None, offset: int | Tensor, of_padding: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(ids, which tokens may be read, their positions, documents of blocks, positions of blocks) of packed tokens.

    Args:
        ids: [B, n], in any order; a negative one is padding.
        real: bool [B, n], False for more padding; or None.
        offset: added to the positions: a number, [B] or [B, n].
    """
    B, n = ids.shape
    ids = ids.detach().contiguous()
    real = None if real is None else real.contiguous()
    readable = torch.empty(B, n, dtype=of_padding, device=ids.device)
    positions = ids.new_empty(B, n, dtype=torch.int32)
    blocks = triton.cdiv(n, BLOCK)
    of_ids, of_positions = ids.new_empty(B, blocks, 2), positions.new_empty(B, blocks, 2)
    offsets = table(offset.view(B, 1, -1, 1) if isinstance(offset, Tensor) else None)
    launch(documents_kernel, B * blocks, ids, real, readable, of_ids, n, BLOCK=BLOCK, num_warps=4)
    launch(
        positions_kernel,
        B * blocks,
        ids,
        of_ids,
        offsets,
        positions,
        of_positions,
        0 if isinstance(offset, Tensor) else offset,
        n,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return ids, readable, positions, of_ids, of_positions


@triton.jit(do_not_specialize=["n"])
def documents_kernel(ids, real, readable, of_blocks, n, BLOCK: tl.constexpr):
    """Which tokens of a block may be read, and the (lowest, highest) of their documents; (-1, -1) without one."""
    i_program = tl.program_id(0).to(tl.int64)
    n_blocks = tl.cdiv(n, BLOCK)
    i_b, o = i_program // n_blocks, (i_program % n_blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    b_ids = tl.load(ids + i_b * n + o, mask=o < n, other=-1)
    m_readable = real_tokens(o, n, real, i_b) & (b_ids >= 0)
    tl.store(readable + i_b * n + o, m_readable.to(readable.dtype.element_ty), mask=o < n)
    highest = tl.maximum(tl.max(b_ids, 0), -1)
    tl.store(of_blocks + i_program * 2, tl.min(tl.where(b_ids >= 0, b_ids, highest), 0))
    tl.store(of_blocks + i_program * 2 + 1, highest)


@triton.jit(do_not_specialize=["offset", "n"])
def positions_kernel(ids, of_ids, offsets, positions, of_positions, offset, n, BLOCK: tl.constexpr):
    """Positions of a block of tokens, by counting those of the same document before them; and their (lowest, highest).

    Where no token has a document, the lowest is above the highest.
    """
    i_program = tl.program_id(0).to(tl.int64)
    n_blocks = tl.cdiv(n, BLOCK)
    i_b, i_block = i_program // n_blocks, (i_program % n_blocks).to(tl.int32)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    b_ids = tl.load(ids + i_b * n + o, mask=o < n, other=-1)
    lowest, highest = tl.load(of_ids + i_program * 2), tl.load(of_ids + i_program * 2 + 1)
    begin, _ = blocks_with(lowest, highest, of_ids + i_b * n_blocks * 2, i_block + 1)
    b_rank = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(begin, i_block + 1):
        o_before = i * BLOCK + tl.arange(0, BLOCK)
        b_before = tl.load(ids + i_b * n + o_before, mask=o_before < n, other=-1)
        m_counted = (b_ids[:, None] == b_before[None, :]) & (o_before[None, :] < o[:, None])
        b_rank += tl.sum(m_counted.to(tl.int32), 1)
    b_position = b_rank.to(tl.int64) + offset
    if offsets.data is not None:
        p_offsets = offsets.data + i_b * offsets.s_b
        if offsets.s_q is not None:
            b_position += tl.load(p_offsets + o.to(tl.int64) * offsets.s_q, mask=o < n, other=0).to(tl.int64)
        else:
            b_position += tl.load(p_offsets).to(tl.int64)
    far = 2 * LAST_POSITION - 2
    b_position = tl.minimum(tl.maximum(b_position, -far), far).to(tl.int32)
    tl.store(positions + i_b * n + o, b_position, mask=o < n)
    tl.store(of_positions + i_program * 2, tl.min(tl.where(b_ids >= 0, b_position, far), 0))
    tl.store(of_positions + i_program * 2 + 1, tl.max(tl.where(b_ids >= 0, b_position, -far), 0))


@triton.jit
def blocks_with(lowest, highest, p_blocks, n_blocks, BLOCK: tl.constexpr = 128):
    """[begin, end) of the blocks that may hold something from `lowest` to `highest`, by their rows of two."""
    b_begin, b_end = tl.full([BLOCK], n_blocks, tl.int32), tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, n_blocks, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_lowest = tl.load(p_blocks + o * 2, mask=o < n_blocks, other=0)
        b_highest = tl.load(p_blocks + o * 2 + 1, mask=o < n_blocks, other=0)
        m_overlap = (o < n_blocks) & (b_lowest <= highest) & (b_highest >= lowest)
        b_begin = tl.minimum(b_begin, tl.where(m_overlap, o, n_blocks))
        b_end = tl.maximum(b_end, tl.where(m_overlap, o + 1, 0))
    return tl.min(b_begin, 0), tl.max(b_end, 0)


class KeyBlocks:
    """What blocks of packed keys hold, from which follows which of them a tile of queries sees; kept once asked for.

    Args:
        visible: the mask, with all but the ranges.
        of_ids, of_positions: [B, blocks, 2], the lowest and the highest of each block.
    """

    def __init__(self, visible: Visibility, of_ids: Tensor, of_positions: Tensor) -> None:
        self._visible, self._blocks = visible, (of_ids, of_positions)
        self._ranges: dict[tuple[int, ...], Tensor] = {}

    def ranges(self, block_m: int) -> Tensor:
        """int32 [B, query tiles, 5]: (first, full_first, full_end, end, unreal) of the keys that tiles of queries see.

        No row sees any outside of [first, end), and every row sees all of [full_first, full_end): each sees its first
        run of neighbours. A query that is not real excludes no tile from anything; `unreal` is 1 where some row is
        none, else 0. A real one that sees nothing makes no tile full.
        """
        if (block_m,) not in self._ranges:
            (B, n_q), n_k = self._visible.positions_q.shape, self._visible.positions_k.shape[1]
            tiles = triton.cdiv(n_q, block_m)
            self._ranges[block_m,] = result = self._visible.positions_q.new_empty(B, tiles, 5)
            sizes = {"BLOCK_M": block_m, "LANES": triton.next_power_of_2(block_m), "BLOCK": BLOCK, "num_warps": 8}
            launch(ranges_kernel, B * tiles, result, self._visible, *self._blocks, n_q, n_k, **sizes)
        return self._ranges[block_m,]

    def query_ranges(self, block_m: int, block_n: int) -> Tensor:
        """int32 [B, key tiles, 4]: `visibility.query_range` of each tile of `block_n` keys, in tiles of queries."""
        if (block_m, block_n) not in self._ranges:
            key_ranges, (B, n_k) = self.ranges(block_m), self._visible.positions_k.shape
            tiles = triton.cdiv(n_k, block_n)
            self._ranges[block_m, block_n] = result = key_ranges.new_empty(B, tiles, 4)
            n_query_tiles = key_ranges.shape[1]
            launch(query_ranges_kernel, B * tiles, key_ranges, result, n_query_tiles, n_k, BLOCK_N=block_n, num_warps=4)
        return self._ranges[block_m, block_n]

    @functools.cached_property
    def spans(self) -> tuple[Tensor | None, Tensor | None]:
        """`real_spans` of the queries and of the keys."""
        return real_spans(self._visible.real_queries), real_spans(self._visible.real_keys)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def ranges_kernel(
    result,
    visible,
    of_ids,
    of_positions,
    n_q,
    n_k,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile's row of `KeyBlocks.ranges`."""
    i_program = tl.program_id(0).to(tl.int64)
    n_tiles, n_blocks = tl.cdiv(n_q, BLOCK_M), tl.cdiv(n_k, BLOCK)
    o_lane = tl.arange(0, LANES)
    i_b, o_q = i_program // n_tiles, (i_program % n_tiles).to(tl.int32) * BLOCK_M + o_lane
    m_row = (o_q < n_q) & (o_lane < BLOCK_M)
    _, m_q, b_position = queries_at(o_q, i_b, n_q, 0, visible)
    m_q = m_q & m_row
    queries = o_q, m_q, b_position
    b_ids = tl.load(visible.documents_q + i_b * n_q + o_q, mask=m_q, other=-1)
    highest = tl.max(b_ids, 0)
    lowest = tl.min(tl.where(m_q, b_ids, highest), 0)
    begin, end = blocks_with(tl.maximum(lowest, 0), highest, of_ids + i_b * n_blocks * 2, n_blocks)
    far = 2 * LAST_POSITION - 2
    nearest, furthest = -far, far
    if visible.left is not None:
        nearest = tl.min(tl.where(m_q, b_position, far), 0) - visible.left
    if visible.right is not None:
        furthest = tl.max(tl.where(m_q, b_position, -far), 0) + visible.right
    begin_near, end_near = blocks_with(nearest, furthest, of_positions + i_b * n_blocks * 2, n_blocks)
    b_first, b_end = tl.full([LANES], n_k, tl.int32), tl.zeros([LANES], tl.int32)
    b_hole = tl.full([LANES], n_k, tl.int32)
    for i in tl.range(tl.maximum(begin, begin_near), tl.minimum(end, end_near)):
        keys = keys_at(i * BLOCK + tl.arange(0, BLOCK), i_b, n_k, visible)
        pairs = as_column(queries), as_row(keys), i_b, 0, n_q, n_k
        m_seen = keep(pairs, visible)
        o_k = keys[0][None, :]
        b_first = tl.minimum(b_first, tl.min(tl.where(m_seen, o_k, n_k), 1))
        b_end = tl.maximum(b_end, tl.max(tl.where(m_seen, o_k + 1, 0), 1))
        b_hole = tl.minimum(b_hole, tl.min(tl.where(m_seen | (o_k < b_first[:, None]), n_k, o_k), 1))
    b_full_first = tl.where(m_q, b_first, 0)
    b_full_end = tl.where(m_q, tl.minimum(b_hole, b_end), n_k)
    p_result = result + i_program * 5
    tl.store(p_result, tl.min(b_first, 0))
    tl.store(p_result + 1, tl.max(b_full_first, 0))
    tl.store(p_result + 2, tl.min(b_full_end, 0))
    tl.store(p_result + 3, tl.max(b_end, 0))
    tl.store(p_result + 4, tl.max(((o_lane < BLOCK_M) & ~m_q).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n_query_tiles", "n_k"])
def query_ranges_kernel(key_ranges, result, n_query_tiles, n_k, BLOCK_N: tl.constexpr):
    """One tile's row of `KeyBlocks.query_ranges`."""
    i_program = tl.program_id(0).to(tl.int64)
    n_tiles = tl.cdiv(n_k, BLOCK_N)
    i_b, i_n = i_program // n_tiles, (i_program % n_tiles).to(tl.int32)
    first, end = i_n * BLOCK_N, tl.minimum(i_n * BLOCK_N + BLOCK_N, n_k)
    begin, full_begin, full_end, end_of_seen = tiles_that_see(first, end, key_ranges, i_b, n_query_tiles)
    tl.store(result + i_program * 4, begin)
    tl.store(result + i_program * 4 + 1, full_begin)
    tl.store(result + i_program * 4 + 2, full_end)
    tl.store(result + i_program * 4 + 3, end_of_seen)
