"""Forward: FlashAttention-3 (Shah et al., 2024, algorithms 1 and 2) in Gluon.

One warp loads tiles by TMA into rings in shared memory. Two or three warp groups compute 64 query rows each, and keep
the tensor cores busy meanwhile: the scores of tile j and the output of tile j - 1 are issued together, and the softmax
of tile j runs while the output is still being multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...spec import LOG2E as LOG2E_VALUE
from ...spec import Spec, empty_output
from ..triton.tiles import LOG2E, Heads, heads, launch
from ..triton.visibility import (
    Visibility,
    as_column,
    as_row,
    is_edge,
    keep,
    key_range,
    keys_at,
    position_of_first_query,
    queries_at,
    real_span,
    visibility,
)
from .configs import ROWS_OF_GROUP, forward_config, padded_head_dim
from .gluon import arrive_named, block_barrier, gl, jit, sync_named, warp_specialize, warpgroup_mma, warpgroup_mma_wait
from .order import item_at, section_of
from .rings import (
    accumulator,
    descriptor,
    in_chunks,
    left_operand,
    load,
    load_real_rows,
    loadable,
    new_ring,
    release,
    tile_in,
    wait_full,
)

ROWS: gl.constexpr = gl.constexpr(ROWS_OF_GROUP)
TURN_OF_FIRST: gl.constexpr = gl.constexpr(9)
"""The named barrier that the first warp group waits at for its turn; the second waits at the next."""


class Sizes(NamedTuple):
    """In a kernel: how many heads a section has, see order.py, and the sizes of the call."""

    section: int
    B: int
    H: int
    n_q: int
    n_k: int


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype and memory order of q, and lse [B, H, n_q] in fp32."""
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    o = empty_output(q, d_v)
    lse = q.new_empty(B, H, n_q, dtype=torch.float32)
    if n_k == 0 or lse.numel() == 0:
        return o.zero_(), lse.fill_(-math.inf)
    q, k, v = loadable(q), loadable(k), loadable(v)
    block_qk, block_v = padded_head_dim(d_qk), padded_head_dim(d_v)
    config = forward_config(max(block_qk, block_v))
    visible = visibility(spec.mask, n_q, n_k).in_tiles(config.block_m)
    items = B * H * triton.cdiv(n_q, config.block_m)
    heavy_first = visible.right is not None and visible.left is None
    scale_log2 = spec.scale * LOG2E_VALUE
    launch(
        forward_kernel,
        min(items, torch.cuda.get_device_properties(q.device).multi_processor_count) if config.persistent else items,
        descriptor(q, ROWS_OF_GROUP, block_qk),
        descriptor(k, config.BLOCK_N, block_qk),
        descriptor(v, config.BLOCK_N, block_v),
        None if visible.real_keys is None else in_chunks(v),
        heads(o),
        lse,
        visible,
        scale_log2,
        section_of(B * H, H // H_kv, n_k * (block_qk + block_v) * k.element_size(), heavy_first),
        B,
        H,
        n_q,
        n_k,
        GROUP=H // H_kv,
        D_V=d_v,
        BLOCK_QK=block_qk,
        BLOCK_V=block_v,
        GROUPS=config.GROUPS,
        BLOCK_N=config.BLOCK_N,
        SLOTS=config.SLOTS,
        PING_PONG=config.PING_PONG,
        POSITIVE_SCALE=scale_log2 >= torch.finfo(torch.float32).tiny,
        REGISTERS=config.REGISTERS,
        num_warps=4,
        maxnreg=config.maxnreg,
    )
    return o, lse


@jit(do_not_specialize=["section", "B", "n_q", "n_k"])
def forward_kernel(
    q,
    k,
    v,
    v_rows: Heads,
    o: Heads,
    lse,
    visible: Visibility,
    scale_log2,
    section,
    B,
    H,
    n_q,
    n_k,
    GROUP: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_QK: gl.constexpr,
    BLOCK_V: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    PING_PONG: gl.constexpr,
    POSITIVE_SCALE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A program takes every so many-th item: GROUPS * 64 rows of a head's output, over the key tiles that they see."""
    q_ring = new_ring(q, GROUPS, 1)
    k_ring = new_ring(k, SLOTS, GROUPS)
    v_ring = new_ring(v, SLOTS, GROUPS)
    block_barrier()
    rings = q_ring, k_ring, v_ring
    tensors = q, k, v
    sizes = Sizes(section, B, H, n_q, n_k)
    if GROUPS == 2:
        warp_specialize(
            [
                (
                    consume,
                    (
                        rings,
                        o,
                        lse,
                        visible,
                        scale_log2,
                        sizes,
                        GROUPS,
                        0,
                        D_V,
                        BLOCK_N,
                        BLOCK_V,
                        PING_PONG,
                        POSITIVE_SCALE,
                    ),
                ),
                (
                    consume,
                    (
                        rings,
                        o,
                        lse,
                        visible,
                        scale_log2,
                        sizes,
                        GROUPS,
                        1,
                        D_V,
                        BLOCK_N,
                        BLOCK_V,
                        PING_PONG,
                        POSITIVE_SCALE,
                    ),
                ),
                (produce, (rings, tensors, v_rows, visible, sizes, GROUPS, GROUP, D_V, BLOCK_N)),
            ],
            [4, 1],
            [REGISTERS[0], REGISTERS[1]],
        )
    else:
        warp_specialize(
            [
                (
                    consume,
                    (
                        rings,
                        o,
                        lse,
                        visible,
                        scale_log2,
                        sizes,
                        GROUPS,
                        0,
                        D_V,
                        BLOCK_N,
                        BLOCK_V,
                        PING_PONG,
                        POSITIVE_SCALE,
                    ),
                ),
                (
                    consume,
                    (
                        rings,
                        o,
                        lse,
                        visible,
                        scale_log2,
                        sizes,
                        GROUPS,
                        1,
                        D_V,
                        BLOCK_N,
                        BLOCK_V,
                        PING_PONG,
                        POSITIVE_SCALE,
                    ),
                ),
                (
                    consume,
                    (
                        rings,
                        o,
                        lse,
                        visible,
                        scale_log2,
                        sizes,
                        GROUPS,
                        2,
                        D_V,
                        BLOCK_N,
                        BLOCK_V,
                        PING_PONG,
                        POSITIVE_SCALE,
                    ),
                ),
                (produce, (rings, tensors, v_rows, visible, sizes, GROUPS, GROUP, D_V, BLOCK_N)),
            ],
            [4, 4, 1],
            [REGISTERS[0], REGISTERS[0], REGISTERS[1]],
        )


@jit
def item_range(i, visible, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The i-th item: (tile, head, batch entry, position of query 0, key tiles as `key_range` has them)."""
    n_tiles = gl.cdiv(sizes.n_q, BLOCK_M)
    i_m, i_h, i_b = item_at(i, n_tiles, sizes.B * sizes.H, sizes.section, sizes.H)
    q_start = position_of_first_query(visible, i_b)
    return i_m, i_h, i_b, q_start, key_range(i_m, i_b, q_start, sizes.n_q, sizes.n_k, visible, BLOCK_M, BLOCK_N)


@jit
def tile_of_step(i_step, tile_range):
    """The key tile that is read in this step: edge tiles first, so that one loop over the others needs no mask.

    From the right: the tiles above the full ones, those below them, the full ones.
    """
    begin, full_begin, full_end, end = tile_range
    n_right, n_edge = end - full_end, end - full_end + full_begin - begin
    i_full = full_end - 1 - (i_step - n_edge)
    return gl.where(
        i_step < n_right, end - 1 - i_step, gl.where(i_step < n_edge, full_begin - 1 - (i_step - n_right), i_full)
    )


@jit
def produce(
    rings,
    tensors,
    v_rows,
    visible,
    sizes,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """One warp: loads what the warp groups read, in the order in which they do."""
    q_ring, k_ring, v_ring = rings
    q, k, v = tensors
    B, H, n_q, n_k = sizes.B, sizes.H, sizes.n_q, sizes.n_k
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    n_q_tiles = 0  # that went through the rings, as below
    n_k_tiles = 0
    for i in range(gl.program_id(0), B * H * gl.cdiv(n_q, BLOCK_M), gl.num_programs(0)):
        i_m, i_h, i_b, q_start, tile_range = item_range(i, visible, sizes, BLOCK_M, BLOCK_N)
        n_steps = tile_range[3] - tile_range[0]
        for i_step in range(n_steps):
            i_n = tile_of_step(i_step, tile_range)
            load(n_k_tiles, k_ring, k, i_b, i_h // GROUP, i_n * BLOCK_N)
            if i_step == 0:
                for i_group in gl.static_range(GROUPS):
                    load(n_q_tiles + i_group, q_ring, q, i_b, i_h, i_m * BLOCK_M + i_group * ROWS)
                n_q_tiles += GROUPS
            if visible.real_keys is None:
                load(n_k_tiles, v_ring, v, i_b, i_h // GROUP, i_n * BLOCK_N)
            else:
                if has_hidden_keys(i_n, i_b, n_k, visible, tile_range, BLOCK_N):
                    load_real_rows(
                        n_k_tiles, v_ring, v_rows, i_b, i_h // GROUP, i_n * BLOCK_N, n_k, visible.real_keys, D_V
                    )
                else:
                    load(n_k_tiles, v_ring, v, i_b, i_h // GROUP, i_n * BLOCK_N)
            n_k_tiles += 1


@jit
def has_hidden_keys(i_n, i_b, n_k, visible, tile_range, BLOCK_N: gl.constexpr):
    """Whether a tile holds keys that padding hides, which may be NaN: 0 times such a value would not be 0."""
    if visible.key_spans is None:
        return is_edge(i_n, tile_range)
    else:
        k_first, k_hole, _ = real_span(visible.key_spans, n_k, i_b)
        return (i_n * BLOCK_N < k_first) | (gl.minimum((i_n + 1) * BLOCK_N, n_k) > k_hole)


@jit
def consume(
    rings,
    o,
    lse,
    visible,
    scale_log2,
    sizes,
    GROUPS: gl.constexpr,
    I_GROUP: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_V: gl.constexpr,
    PING_PONG: gl.constexpr,
    POSITIVE_SCALE: gl.constexpr,
):
    """One warp group: computes 64 rows of the output of each item."""
    q_ring, k_ring, v_ring = rings
    B, H, n_q, n_k = sizes.B, sizes.H, sizes.n_q, sizes.n_k
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    of_scores: gl.constexpr = accumulator(BLOCK_N)
    of_output: gl.constexpr = accumulator(BLOCK_V)
    as_left: gl.constexpr = left_operand(BLOCK_V)
    rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    rows_of_output: gl.constexpr = gl.SliceLayout(1, of_output)
    dtype: gl.constexpr = v_ring.tiles.dtype
    if PING_PONG:
        if I_GROUP == 1:
            arrive_named(TURN_OF_FIRST, 256)
    n_q_tile = I_GROUP + 0
    n_k_tiles = 0
    for i in range(gl.program_id(0), B * H * gl.cdiv(n_q, BLOCK_M), gl.num_programs(0)):
        i_m, i_h, i_b, q_start, tile_range = item_range(i, visible, sizes, BLOCK_M, BLOCK_N)
        begin, full_begin, full_end, end = tile_range
        n_steps, n_edge = end - begin, end - full_end + full_begin - begin
        o_q = i_m * BLOCK_M + I_GROUP * ROWS + gl.arange(0, ROWS, layout=rows)
        queries = queries_at(o_q, i_b, n_q, q_start, visible)

        b_max_log2 = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
        b_sum = gl.zeros([ROWS], gl.float32, layout=rows)
        b_o = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=of_output)
        if n_steps > 0:
            wait_full(n_q_tile, q_ring)
            t_q = tile_in(n_q_tile, q_ring)
            # The first tile has no output of a tile before it.
            b_s = warpgroup_mma_wait(0, deps=(scores_coming(n_k_tiles, t_q, k_ring),))
            release(n_k_tiles, k_ring)
            i_n = tile_of_step(0, tile_range)
            b_left, b_rescale, b_max_log2, b_sum = weigh(
                b_s, b_max_log2, b_sum, queries, i_n, i_b, sizes, visible, scale_log2, True, POSITIVE_SCALE, v_ring
            )
            for i_step in range(1, n_edge):
                b_left, b_o, b_max_log2, b_sum = step(
                    n_k_tiles + i_step,
                    rings,
                    t_q,
                    b_left,
                    b_o,
                    b_max_log2,
                    b_sum,
                    queries,
                    tile_of_step(i_step, tile_range),
                    i_b,
                    sizes,
                    visible,
                    scale_log2,
                    True,
                    POSITIVE_SCALE,
                    I_GROUP,
                    PING_PONG,
                )
            for i_step in range(gl.maximum(n_edge, 1), n_steps):
                b_left, b_o, b_max_log2, b_sum = step(
                    n_k_tiles + i_step,
                    rings,
                    t_q,
                    b_left,
                    b_o,
                    b_max_log2,
                    b_sum,
                    queries,
                    tile_of_step(i_step, tile_range),
                    i_b,
                    sizes,
                    visible,
                    scale_log2,
                    False,
                    POSITIVE_SCALE,
                    I_GROUP,
                    PING_PONG,
                )
            release(n_q_tile, q_ring)
            n_q_tile += GROUPS
            n_k_tiles += n_steps
            wait_full(n_k_tiles - 1, v_ring)
            b_o_coming = warpgroup_mma(b_left, tile_in(n_k_tiles - 1, v_ring), b_o, is_async=True)
            b_o = warpgroup_mma_wait(0, deps=(b_o_coming,))
            release(n_k_tiles - 1, v_ring)

        # Equal to 0, not "not above 0": a NaN that was seen must come out.
        m_nothing_seen = (b_sum == 0.0) | ~queries[1]
        b_sum = gl.where(m_nothing_seen, 1.0, b_sum)
        b_lse = gl.where(m_nothing_seen, float("-inf"), (b_max_log2 + gl.log2(b_sum)) / LOG2E)
        gl.store(lse + (i_b.to(gl.int64) * H + i_h) * n_q + o_q, b_lse, mask=o_q < n_q)

        b_factor = gl.convert_layout(1.0 / b_sum, rows_of_output)
        m_zero = gl.convert_layout(m_nothing_seen, rows_of_output)
        b_o = gl.where(gl.expand_dims(m_zero, 1), 0.0, b_o * gl.expand_dims(b_factor, 1))
        o_row = i_m * BLOCK_M + I_GROUP * ROWS + gl.arange(0, ROWS, layout=rows_of_output)
        o_col = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, of_output))
        p_o = o.data + i_b.to(gl.int64) * o.s[0] + i_h.to(gl.int64) * o.s[1]
        p_o += gl.expand_dims(o_row.to(gl.int64) * o.s[2], 1) + gl.expand_dims(o_col * o.s[3], 0)
        m_o = gl.expand_dims(o_row < n_q, 1) & gl.expand_dims(o_col < D_V, 0)
        gl.store(p_o, b_o.to(dtype), mask=m_o)


@jit
def step(
    n,
    rings,
    t_q,
    b_left,
    b_o,
    b_max_log2,
    b_sum,
    queries,
    i_n,
    i_b,
    sizes,
    visible,
    scale_log2,
    EDGE: gl.constexpr,
    POSITIVE_SCALE: gl.constexpr,
    I_GROUP: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Scores and weights of the n-th tile of the rings, and the output of the one before, whose weights are `b_left`."""
    k_ring, v_ring = rings[1], rings[2]
    BLOCK_V: gl.constexpr = v_ring.tiles.shape[4]
    wait_full(n, k_ring)
    if PING_PONG:
        sync_named(TURN_OF_FIRST + I_GROUP, 256)
    b_s_coming = scores_coming(n, t_q, k_ring)
    wait_full(n - 1, v_ring)
    b_o_coming = warpgroup_mma(b_left, tile_in(n - 1, v_ring), b_o, is_async=True)
    if PING_PONG:
        arrive_named(TURN_OF_FIRST + 1 - I_GROUP, 256)
    b_s = warpgroup_mma_wait(1, deps=(b_s_coming,))
    release(n, k_ring)
    b_left, b_rescale, b_max_log2, b_sum = weigh(
        b_s, b_max_log2, b_sum, queries, i_n, i_b, sizes, visible, scale_log2, EDGE, POSITIVE_SCALE, v_ring
    )
    b_o = warpgroup_mma_wait(0, deps=(b_o_coming,))
    release(n - 1, v_ring)
    b_o *= gl.expand_dims(gl.convert_layout(b_rescale, gl.SliceLayout(1, accumulator(BLOCK_V))), 1)
    return b_left, b_o, b_max_log2, b_sum


@jit
def scores_coming(n, t_q, k_ring):
    """Issues the products q k^T of the n-th tile of the ring, [64, N]."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=accumulator(BLOCK_N))
    return warpgroup_mma(t_q, tile_in(n, k_ring).permute((1, 0)), b_zero, use_acc=False, is_async=True)


@jit
def weigh(
    b_s,
    b_max_log2,
    b_sum,
    queries,
    i_n,
    i_b,
    sizes,
    visible,
    scale_log2,
    EDGE: gl.constexpr,
    POSITIVE_SCALE: gl.constexpr,
    v_ring,
):
    """The online softmax of a tile of products: (weights, factor for what was summed before, new maximum, new sum).

    The weights are those of a left operand, in the dtype of the query's.
    """
    n_q, n_k = sizes.n_q, sizes.n_k
    BLOCK_N: gl.constexpr = b_s.shape[1]
    if not POSITIVE_SCALE:  # else the largest product has the largest score, and the scale goes into one fma
        b_s *= scale_log2
        scale_log2 = 1.0
    if EDGE:
        o_k = i_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, accumulator(BLOCK_N)))
        pairs = as_column(queries), as_row(keys_at(o_k, i_b, n_k, visible)), i_b, 0, n_q, n_k
        b_s = gl.where(keep(pairs, visible), b_s, float("-inf"))
    b_new_max_log2 = gl.maximum(b_max_log2, gl.max(b_s, 1) * scale_log2)
    # A row that has seen nothing yet counts from 0, since -inf - -inf is NaN.
    b_base_log2 = gl.where(b_new_max_log2 == float("-inf"), 0.0, b_new_max_log2)
    b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_base_log2, 1))
    b_rescale = gl.exp2(b_max_log2 - b_base_log2)
    b_sum = b_sum * b_rescale + gl.sum(b_p, 1)
    return (
        gl.convert_layout(b_p.to(v_ring.tiles.dtype), left_operand(v_ring.tiles.shape[4])),
        b_rescale,
        b_new_max_log2,
        b_sum,
    )
