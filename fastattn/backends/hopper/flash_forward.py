"""Forward: FlashAttention-3 (Shah et al., 2024, algorithms 1 and 2) in Gluon.

A warp loads tiles by TMA into rings in shared memory; two or three warp groups compute 64 query rows each. The tensor
cores are kept busy by issuing the products of a tile together with the output of the tile before: the softmax of the
one runs while the other is still being multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ... import spec as what
from ..triton.launches import Launches, kind_of, repeated
from ..triton.rules import Rules, rules_of
from ..triton.scores import headroom_log2
from ..triton.tiles import LOG2E, Heads, heads
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
    real_tokens,
)
from .configs import ROWS_OF_GROUP, forward_config, padded_head_dim
from .gluon import (
    arrive_named,
    gl,
    jit,
    opaque,
    reciprocal,
    sync_named,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .order import Order, item_at, l2_group_of, programs_for
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
    rings_are_ready,
    tile_in,
    wait_full,
)

ROWS: gl.constexpr = gl.constexpr(ROWS_OF_GROUP)
HUGE_LOG2: gl.constexpr = gl.constexpr(2.0**28)
"""Half a unit in its last place is 8, and 2^8 a number of fp16 and bf16."""
FIRST_TURN: gl.constexpr = gl.constexpr(9)
"""The named barrier where the first warp group waits for its turn; the second waits at the next."""


class Call(NamedTuple):
    """Arguments of the computation, in a kernel, besides q, k and v."""

    visible: Visibility
    scale_log2: float
    n_q: int
    n_k: int
    order: Order


def forward(q: Tensor, k: Tensor, v: Tensor, spec: what.Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype and memory order of q, and lse [B, H, n_q] in fp32."""
    given = q, k, v
    kind = kind_of(forward, given, spec)
    if outputs := repeated(kind, given, spec):
        return tuple(outputs)
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    o = what.empty_output(q, d_v)
    lse = q.new_empty(B, H, n_q, dtype=torch.float32)
    if n_k == 0 or lse.numel() == 0:
        return o.zero_(), lse.fill_(-math.inf)
    q, k, v = loadable(q), loadable(k), loadable(v)
    block_qk, block_v = padded_head_dim(d_qk), padded_head_dim(d_v)
    mask = spec.mask
    padding = any(x is not None for x in (mask.real_queries, mask.real_keys, mask.segment_ids))
    config = forward_config(max(block_qk, block_v), padding)
    rules = rules_of(spec, n_q, n_k, v.dtype, torch.bool)
    launches = Launches(rules, given, (q, k, v), (o, lse))
    visible = launches.made(_visible_to_tiles, (rules,), config.block_m)
    scale_log2 = spec.scale * what.LOG2E
    n_tiles, n_heads = triton.cdiv(n_q, config.block_m), B * H
    l2_group = l2_group_of(n_heads, H // H_kv, n_k * (d_qk + d_v) * k.element_size(), visible)
    n_programs = programs_for(n_tiles * n_heads, config.persistent, q.device)
    launches.launch(
        forward_kernel,
        n_programs,
        descriptor(launches, q, ROWS_OF_GROUP, block_qk),
        descriptor(launches, k, config.BLOCK_N, block_qk),
        descriptor(launches, v, config.BLOCK_N, block_v),
        None if visible.real_keys is None else in_chunks(v),
        heads(o),
        lse,
        visible,
        scale_log2,
        float(headroom_log2(v.dtype)),
        n_q,
        n_k,
        n_tiles * n_heads,
        n_programs,
        n_tiles,
        n_heads,
        l2_group,
        H,
        GROUP=H // H_kv,
        D_V=d_v,
        **config.options(),
    )
    launches.keep(kind, n_q, n_k, v.dtype, torch.bool)
    return o, lse


def _visible_to_tiles(rules: Rules, block_m: int) -> Visibility:
    return rules.visible.in_tiles(block_m)


@jit(do_not_specialize=["n_q", "n_k", "n_items", "n_programs", "n_tiles", "n_heads", "l2_group"])
def forward_kernel(
    q,
    k,
    v,
    v_rows: Heads,
    o: Heads,
    lse,
    visible: Visibility,
    scale_log2,
    headroom_log2,
    n_q,
    n_k,
    n_items,
    n_programs,
    n_tiles,
    n_heads,
    l2_group,
    H,
    GROUP: gl.constexpr,
    D_V: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """A program takes every so many-th item: GROUPS * 64 rows of a head's output, over the key tiles that they see."""
    order = Order(n_items, n_programs, n_tiles, n_heads, l2_group, H)
    call = Call(visible, scale_log2, n_q, n_k, order)
    gl.assume((n_q >= 0) & (n_k >= 0) & (H >= 0))
    gl.assume((o.s[0] >= 0) & (o.s[1] >= 0) & (o.s[2] >= 0))
    tensors = q, k, v
    rings = new_ring(q, GROUPS * Q_SLOTS, 1), new_ring(k, SLOTS, GROUPS), new_ring(v, SLOTS, GROUPS)
    rings_are_ready()
    first = opaque(gl.program_id(0))  # so the partitions get it by shared memory: ptxas would keep it in local memory
    # Constants reach a partition only from a tuple that is written here.
    if GROUPS == 2:
        warp_specialize(
            [
                (consume, (rings, o, lse, call, headroom_log2, first, GROUPS, 0, D_V, PING_PONG)),
                (consume, (rings, o, lse, call, headroom_log2, first, GROUPS, 1, D_V, PING_PONG)),
                (produce, (rings, tensors, v_rows, call, first, GROUPS, GROUP, D_V)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        warp_specialize(
            [
                (consume, (rings, o, lse, call, headroom_log2, first, GROUPS, 0, D_V, False)),
                (consume, (rings, o, lse, call, headroom_log2, first, GROUPS, 1, D_V, False)),
                (consume, (rings, o, lse, call, headroom_log2, first, GROUPS, 2, D_V, False)),
                (produce, (rings, tensors, v_rows, call, first, GROUPS, GROUP, D_V)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


@jit
def work_item(i, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The i-th item: (tile, head, batch entry, position of query 0, key tiles as `key_range` has them)."""
    n_q, n_k = call.n_q, call.n_k
    i_m, i_h, i_b = item_at(i, call.order)
    q_offset = position_of_first_query(call.visible, i_b)
    # n_q anew: else the number of tiles, computed from it, is kept in local memory over the whole kernel.
    tile_range = key_range(i_m, i_b, q_offset, opaque(n_q), n_k, call.visible, BLOCK_M, BLOCK_N)
    return i_m, i_h, i_b, q_offset, tile_range


@jit
def produce(rings, tensors, v_rows, call, first, GROUPS: gl.constexpr, GROUP: gl.constexpr, D_V: gl.constexpr):
    """The warp that loads: every tile that the warp groups read, in the order in which they do."""
    q_ring, k_ring, v_ring = rings
    q, k, v = tensors
    n_k, visible = call.n_k, call.visible
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    n_q_tiles = 0  # that went through the rings, and so below
    n_k_tiles = 0
    for i in range(first, call.order.n_items, call.order.n_programs):
        i_m, i_h, i_b, _, tile_range = work_item(i, call, BLOCK_M, BLOCK_N)
        i_h_kv = i_h // GROUP
        n_steps = tile_range[3] - tile_range[0]
        for i_step in range(n_steps):
            i_n = tile_range[3] - 1 - i_step
            load(n_k_tiles, k_ring, k, i_b, i_h_kv, i_n * BLOCK_N)
            if i_step == 0:  # after the keys, for which there is room earlier
                for i_group in gl.static_range(GROUPS):
                    load(n_q_tiles + i_group, q_ring, q, i_b, i_h, i_m * BLOCK_M + i_group * ROWS)
                n_q_tiles += GROUPS
            if visible.real_keys is None:
                load(n_k_tiles, v_ring, v, i_b, i_h_kv, i_n * BLOCK_N)
            elif has_hidden_keys(i_n, i_b, n_k, visible, tile_range, BLOCK_N):
                load_real_rows(n_k_tiles, v_ring, v_rows, i_b, i_h_kv, i_n * BLOCK_N, n_k, visible.real_keys, D_V)
            else:
                load(n_k_tiles, v_ring, v, i_b, i_h_kv, i_n * BLOCK_N)
            n_k_tiles += 1


@jit
def has_hidden_keys(i_n, i_b, n_k, visible, tile_range, BLOCK_N: gl.constexpr):
    """Whether padding hides keys of a tile. They may be NaN, which a weight of 0 does not make 0."""
    if visible.key_spans is None:
        return is_edge(i_n, tile_range)
    else:
        k_first, k_hole, _ = real_span(visible.key_spans, n_k, i_b)
        return (i_n * BLOCK_N < k_first) | (gl.minimum((i_n + 1) * BLOCK_N, n_k) > k_hole)


@jit
def consume(
    rings,
    o: Heads,
    lse,
    call,
    headroom_log2,
    first,
    GROUPS: gl.constexpr,
    I_GROUP: gl.constexpr,
    D_V: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """A warp group: 64 rows of the output of every item, over the key tiles from the last one down."""
    q_ring, k_ring, v_ring = rings
    n_q, visible = call.n_q, call.visible
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    BLOCK_V: gl.constexpr = v_ring.tiles.shape[4]
    rows: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_N))
    if PING_PONG and I_GROUP == 1:
        arrive_named(FIRST_TURN, 2 * gl.num_warps() * 32)
    n_turns = 0  # items that had something to see
    n_k_tiles = 0
    for i in range(first, call.order.n_items, call.order.n_programs):
        i_m, _, i_b, q_offset, tile_range = work_item(i, call, BLOCK_M, BLOCK_N)
        i_row = i_m * BLOCK_M + I_GROUP * ROWS
        queries = queries_at(i_row + gl.arange(0, ROWS, layout=rows), i_b, n_q, q_offset, visible)
        n_steps = tile_range[3] - tile_range[0]

        b_max = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
        b_sum = gl.zeros([ROWS], gl.float32, layout=rows)
        b_o = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=accumulator(BLOCK_V))
        if n_steps > 0:
            n_q_tile = n_turns * GROUPS + I_GROUP
            wait_full(n_q_tile, q_ring)
            t_q = tile_in(n_q_tile, q_ring)
            # The first tile, before which there is no other one to multiply. Its mask is applied even where it is full.
            b_s = warpgroup_mma_wait(0, deps=(products_coming(n_k_tiles, t_q, k_ring),))
            release(n_k_tiles, k_ring)
            tokens = queries, tile_range[3] - 1, i_b
            b_p, b_rescale, b_max, b_sum = weigh(b_s, b_max, b_sum, tokens, True, call, headroom_log2)
            b_left = gl.convert_layout(b_p.to(v_ring.tiles.dtype), left_operand(BLOCK_V))
            for i_step in range(1, n_steps):
                n = n_k_tiles + i_step
                i_n = tile_range[3] - 1 - i_step
                edge = is_edge(i_n, tile_range)
                if PING_PONG:
                    sync_named(FIRST_TURN + I_GROUP, 2 * gl.num_warps() * 32)
                b_s_coming = products_coming(n, t_q, k_ring)
                b_o_coming = output_coming(n - 1, b_left, b_o, v_ring)
                if PING_PONG:
                    arrive_named(FIRST_TURN + 1 - I_GROUP, 2 * gl.num_warps() * 32)
                b_s = warpgroup_mma_wait(1, deps=(b_s_coming,))
                release(n, k_ring)
                tokens = queries, i_n, i_b
                b_p, b_rescale, b_max, b_sum = weigh(b_s, b_max, b_sum, tokens, edge, call, headroom_log2)
                b_left = gl.convert_layout(b_p.to(v_ring.tiles.dtype), left_operand(BLOCK_V))
                wait_full(n - 1, v_ring)  # it is: but ptxas moves the wait for products before all that this follows
                b_o = warpgroup_mma_wait(0, deps=(b_o_coming,))
                release(n - 1, v_ring)
                b_o *= as_output_rows(b_rescale, BLOCK_V)
            release(n_q_tile, q_ring)
            n_turns += 1
            n_k_tiles += n_steps
            b_o = warpgroup_mma_wait(0, deps=(output_coming(n_k_tiles - 1, b_left, b_o, v_ring),))
            release(n_k_tiles - 1, v_ring)

        i_m, i_h, i_b = item_at(opaque(i), call.order)
        i_row = i_m * BLOCK_M + I_GROUP * ROWS
        o_q = i_row + gl.arange(0, ROWS, layout=rows)
        # Equal to 0, not "not above 0": a NaN that was seen must come out.
        m_nothing_seen = (b_sum == 0.0) | ~real_tokens(o_q, n_q, visible.real_queries, i_b)
        b_sum = gl.where(m_nothing_seen, 1.0, b_sum)
        b_lse_log2 = b_max * call.scale_log2 + (gl.log2(b_sum) + headroom_log2)
        b_lse = gl.where(m_nothing_seen, float("-inf"), b_lse_log2 / LOG2E)
        gl.store(lse + (i_b * call.order.H + i_h) * n_q + o_q, b_lse, mask=o_q < n_q)
        b_o = gl.where(as_output_rows(m_nothing_seen, BLOCK_V), 0.0, b_o * as_output_rows(1.0 / b_sum, BLOCK_V))
        store_rows(o, i_b, i_h, i_row, n_q, b_o, D_V)


@jit
def products_coming(n, t_q, k_ring):
    """q k^T [64, N] for the n-th tile of the ring, issued once that is there."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=accumulator(BLOCK_N))
    wait_full(n, k_ring)
    return warpgroup_mma(t_q, tile_in(n, k_ring).permute((1, 0)), b_zero, use_acc=False, is_async=True)


@jit
def output_coming(n, b_left, b_o, v_ring):
    """b_o and the weights `b_left` times the n-th tile of the ring, [64, D], issued once that is there."""
    wait_full(n, v_ring)
    return warpgroup_mma(b_left, tile_in(n, v_ring), b_o, is_async=True)


@jit
def weigh(b_s, b_max, b_sum, tokens, edge, call, headroom_log2):
    """The online softmax of a tile of products: (weights, factor for what was summed before, new maximum, new sum)."""
    queries, i_n, i_b = tokens
    BLOCK_N: gl.constexpr = b_s.shape[1]
    if edge:
        o_k = i_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, accumulator(BLOCK_N)))
        keys = keys_at(o_k, i_b, call.n_k, call.visible)
        pairs = as_column(queries), as_row(keys), i_b, 0, call.n_q, call.n_k
        b_s = gl.where(keep(pairs, call.visible), b_s, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_s, 1))
    # A row that has seen nothing yet counts from 0, since -inf - -inf is NaN.
    b_base = gl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_factor = factor_of_rows(b_base, call.scale_log2)
    b_minus_base_log2 = gl.fma(-b_base, b_factor, -headroom_log2)
    b_p = gl.exp2(gl.fma(b_s, gl.expand_dims(b_factor, 1), gl.expand_dims(b_minus_base_log2, 1)))
    b_rescale = gl.exp2((b_max - b_base) * call.scale_log2)
    return b_p, b_rescale, b_new_max, b_sum * b_rescale + gl.sum(b_p, 1)


@jit
def factor_of_rows(b_base, factor):
    """What the scores of rows with that maximum are multiplied by: the factor, or less where the maximum is huge.

    Weights are 2^(factor * score - base), of which the base is rounded and the product is not: beyond 2^28 that would
    be an exponent of more than 8, and of 128 in the end. Scores that differ there do so by more than leaves a weight.
    """
    return gl.minimum(HUGE_LOG2 * reciprocal(gl.abs(b_base)), factor)


@jit
def as_output_rows(b_x, BLOCK_V: gl.constexpr):
    """One number for each row of the scores, shaped for the output [64, BLOCK_V]."""
    return gl.expand_dims(gl.convert_layout(b_x, gl.SliceLayout(1, accumulator(BLOCK_V))), 1)


@jit
def store_rows(x: Heads, i_b, i_h, i_row, n, b_x, D: gl.constexpr):
    """Writes rows of a head from `i_row` on, up to row n and column D; `b_x` is an accumulator."""
    COLUMNS: gl.constexpr = b_x.shape[1]
    layout: gl.constexpr = accumulator(COLUMNS)
    o_row = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_col = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    p_rows = x.data + i_b * x.s[0] + i_h * x.s[1] + gl.expand_dims(o_row.to(gl.int64) * x.s[2], 1)
    m_rows = gl.expand_dims(o_row < n, 1) & gl.expand_dims(o_col < D, 0)
    gl.store(p_rows + gl.expand_dims(o_col * x.s[3], 0), b_x.to(x.data.dtype.element_ty), mask=m_rows)
