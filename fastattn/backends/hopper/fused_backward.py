"""Backward that is free in the order of its sums: all three gradients by one kernel, with five products.

Each work item is about 128 keys, as that of dK and dV in .flash_backward is. What it adds to dQ goes to memory by TMA,
which adds there, in fp32 and in the order in which items happen to come: the bits may differ between runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import spec as what
from ..triton.flash_backward import constant_where_nothing_is_seen
from ..triton.launches import Launches, kind_of, repeated
from ..triton.tiles import Heads, head_of, heads, load_tile, program_share, store_tile
from ..triton.visibility import Visibility, is_edge, keys_at, real_tokens
from . import flash_backward
from .configs import ROWS_OF_GROUP, fused_config, padded_head_dim
from .flash_backward import (
    DELTA,
    Hidden,
    Inputs,
    descriptor_of_rows,
    empty_rows,
    has_hidden,
    hidden_keys,
    hidden_queries,
    key_item,
    larger_head_dim,
    of_real,
    prepared,
    produce_dk_dv,
    real_queries_of,
    row_in,
    rules_arguments,
    store_item,
    visible_to_key_tiles,
    weights_of_keys,
)
from .flash_forward import ROWS, Call
from .gluon import (
    fence_async_shared,
    gl,
    jit,
    opaque,
    part_of,
    store_wait,
    sync_named,
    tma_reduce_add,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .order import Order, l2_group_of, programs_for
from .rings import (
    Ring,
    accumulator,
    descriptor,
    left_operand,
    loadable,
    new_ring,
    release,
    rings_are_ready,
    tile_in,
    wait_full,
)

BOTH: gl.constexpr = gl.constexpr(9)
"""The named barrier where the two warp groups wait for each other."""
WIDEST_CAUSAL = 64
"""The head dim above which causal calls take this kernel 1.16 to 1.44 times as long as the two others, on an H100."""


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: what.Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, None, None, None); None where `output_mask` does not ask for it.

    The kernels of .flash_backward serve head dims above 128, for which there are too few registers, wide causal calls,
    and whoever asks for dq alone or not for it, for whom they do less.
    """
    dq_wanted, dk_wanted, dv_wanted = output_mask[:3]
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    if (
        fused_config(head_dim) is None
        or (spec.mask.causal and head_dim > WIDEST_CAUSAL)
        or not (dq_wanted and (dk_wanted or dv_wanted))
    ):
        return flash_backward.backward(do, dlse, q, k, v, o, lse, spec, output_mask)
    do = torch.zeros_like(o, memory_format=torch.contiguous_format) if do is None else do
    given = q, k, v, o, do, lse, constant_where_nothing_is_seen(dlse, lse)
    kind = kind_of((backward, output_mask), given, spec)
    dq, dk, dv, *_ = repeated(kind, given, spec) or _launched(kind, given, spec)
    return dq, dk if dk_wanted else None, dv if dv_wanted else None, None, None, None


def _launched(kind: tuple, given: tuple[Tensor | None, ...], spec: what.Spec) -> tuple[Tensor, ...]:
    """What the kernels write: dq, dk, dv, rows of every query, and sums of dq."""
    q, k, v = given[:3]
    dq, dk, dv = torch.empty_like(q), loadable(torch.empty_like(k)), loadable(torch.empty_like(v))
    rows, sums = empty_rows(given[5]), q.new_zeros(q.shape, dtype=torch.float32)
    launches, inputs = prepared(given, spec, (dq, dk, dv, rows, sums), sums)
    compute_all(launches, dq, dk, dv, sums, inputs, spec.scale)
    launches.keep(kind, *rules_arguments(inputs))
    return dq, dk, dv, rows, sums


def compute_all(
    launches: Launches, dq: Tensor, dk: Tensor, dv: Tensor, sums: Tensor, inputs: Inputs, scale: float
) -> None:
    """Computes dQ, dK and dV in one launch; `sums` are of dQ, without the scale."""
    q, k, v, do, rows = inputs
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    rules = launches.rules
    padding = rules.visible.real_queries is not None or rules.visible.real_keys is not None
    config = fused_config(larger_head_dim(inputs), padding)
    # Q and K are padded to the larger one, by which BLOCK_M goes: so dQ of a tile makes two parts of [64, 64].
    block_qk, block_v = larger_head_dim(inputs), padded_head_dim(d_v)
    visible = launches.made(visible_to_key_tiles, (rules,), config.BLOCK_M, config.block_n)
    n_tiles, n_heads = triton.cdiv(n_k, config.block_n), B * H_kv
    n_programs = programs_for(n_tiles * n_heads, config.persistent, q.device)
    launches.launch(
        fused_kernel,
        n_programs,
        descriptor(launches, q, config.BLOCK_M, block_qk),
        descriptor(launches, k, ROWS_OF_GROUP, block_qk),
        descriptor(launches, v, ROWS_OF_GROUP, block_v),
        descriptor(launches, do, config.BLOCK_M, block_v),
        descriptor_of_rows(launches, rows, config.BLOCK_M),
        descriptor(launches, sums, ROWS_OF_GROUP, 64),
        descriptor(launches, dk, ROWS_OF_GROUP, block_qk),
        descriptor(launches, dv, ROWS_OF_GROUP, block_v),
        visible,
        launches.made(hidden_queries, (rules, q, do)),
        launches.made(hidden_keys, (rules, k)),
        scale,
        scale * what.LOG2E,
        n_q,
        n_k,
        n_tiles * n_heads,
        n_programs,
        n_tiles,
        n_heads,
        l2_group_of(n_heads, 1, H // H_kv * n_q * (d_qk + d_v) * q.element_size(), visible),
        H_kv,
        GROUP=H // H_kv,
        D_QK=d_qk,
        D_V=d_v,
        **config.options(),
    )
    launches.launch(
        scaled_kernel,
        B * H * triton.cdiv(n_q, ROWS_OF_GROUP),
        heads(sums),
        heads(dq),
        launches.made(real_queries_of, (rules,)),
        scale,
        H,
        n_q,
        D=d_qk,
        BLOCK_M=ROWS_OF_GROUP,
        BLOCK_D=padded_head_dim(d_qk),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["n_q"])
def scaled_kernel(
    sums: Heads, dq: Heads, real_queries, scale, H, n_q, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """dQ of a tile of queries, once all items have added to its sums; 0 where padding hides them."""
    i_m, i_h, i_b = program_share(tl.cdiv(n_q, BLOCK_M), H)
    o_q = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_q = real_tokens(o_q, n_q, real_queries, i_b)
    b_dq = load_tile(head_of(sums, i_b, i_h), sums, i_m, m_q, D, BLOCK_M, BLOCK_D) * scale
    store_tile(head_of(dq, i_b, i_h), dq, i_m, o_q < n_q, b_dq, D, BLOCK_M, BLOCK_D)


@jit(do_not_specialize=["n_q", "n_k", "n_items", "n_programs", "n_tiles", "n_heads", "l2_group"])
def fused_kernel(
    q,
    k,
    v,
    do,
    rows,
    dq,
    dk,
    dv,
    visible: Visibility,
    hidden: Hidden,
    hidden_keys: Hidden,
    scale,
    scale_log2,
    n_q,
    n_k,
    n_items,
    n_programs,
    n_tiles,
    n_heads,
    l2_group,
    H_kv,
    GROUP: gl.constexpr,
    D_QK: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_M: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    DO_SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """A program takes every so many-th item: 128 keys of a head, over the query tiles of all heads that share it."""
    call = Call(visible, scale_log2, n_q, n_k, Order(n_items, n_programs, n_tiles, n_heads, l2_group, H_kv))
    gl.assume((n_q >= 0) & (n_k >= 0) & (H_kv >= 0))
    tensors = q, k, v, do, rows
    gradients = dk, dv
    q_ring, do_ring, rows_ring = new_ring(q, Q_SLOTS, 2), new_ring(do, DO_SLOTS, 2), new_ring(rows, DO_SLOTS, 2)
    rows_ring = Ring(rows_ring.tiles, rows_ring.full, do_ring.empty)  # released together
    k_ring, v_ring = new_ring(k, 2, 1), new_ring(v, 2, 1)  # a slot for each warp group
    rings = q_ring, k_ring, v_ring, do_ring, rows_ring
    # dS of step n lies in tiles 2 n and 2 n + 1, one from each warp group: there is room for two steps.
    ds_ring = Ring(gl.allocate_shared_memory(q.dtype, [4, 1, 1, ROWS, BLOCK_M], q.layout), None, None)
    dq_ring = Ring(gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS, 64], dq.layout), None, None)
    to_dq = ds_ring, dq_ring, dq
    rings_are_ready()
    first = opaque(gl.program_id(0))  # so the partitions get it by shared memory: ptxas would keep it in local memory
    warp_specialize(
        [
            (consume_all, (rings, to_dq, gradients, hidden_keys, scale, call, first, 0, GROUP)),
            (consume_all, (rings, to_dq, gradients, hidden_keys, scale, call, first, 1, GROUP)),
            (produce_dk_dv, (rings, tensors, gradients, hidden, hidden_keys, call, first, GROUP, D_QK, D_V)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@jit
def wait_for_each_other():
    """Waits until both warp groups have come here; what either has done before has happened for both."""
    sync_named(BOTH, 2 * gl.num_warps() * 32)


@jit
def consume_all(rings, to_dq, gradients, hidden_keys, scale, call, first, I_GROUP: gl.constexpr, GROUP: gl.constexpr):
    """A warp group: 64 rows of dK and dV of every item and a half of what it adds to dQ, over the query tiles."""
    q_ring, k_ring, v_ring, do_ring = rings[0], rings[1], rings[2], rings[3]
    dk, dv = gradients
    n_k = call.n_k
    BLOCK_M: gl.constexpr = q_ring.tiles.shape[3]
    BLOCK_N: gl.constexpr = 2 * ROWS
    BLOCK_QK: gl.constexpr = q_ring.tiles.shape[4]
    BLOCK_V: gl.constexpr = do_ring.tiles.shape[4]
    n_key_tiles = 0  # those of an item lie in the slots of these numbers
    n_tiles = 0
    for i in range(first, call.order.n_items, call.order.n_programs):
        i_n, i_h, i_b, q_offset, tile_range = key_item(i, call, BLOCK_M, BLOCK_N)
        i_row = i_n * BLOCK_N + I_GROUP * ROWS
        o_k = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(ROWS)))
        keys = keys_at(o_k, i_b, n_k, call.visible)
        unreal = i_row + ROWS > n_k  # whether some of the rows are no keys that may be seen
        if hidden_keys.real is not None:
            unreal |= has_hidden(i_n * 2 + I_GROUP, i_b, n_k, hidden_keys.spans, ROWS)
        b_dk = gl.zeros([ROWS, BLOCK_QK], gl.float32, layout=accumulator(BLOCK_QK))
        b_dv = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=accumulator(BLOCK_V))
        wait_full(n_key_tiles, k_ring)
        wait_full(n_key_tiles + 1, k_ring)
        wait_full(n_key_tiles + I_GROUP, v_ring)
        for i_step in range((tile_range[3] - tile_range[0]) * GROUP):
            i_m, i_hq = tile_range[0] + i_step // GROUP, i_h * GROUP + i_step % GROUP
            tokens = keys, i_m * BLOCK_M, i_b, q_offset
            edge = is_edge(i_m, tile_range)
            of_keys = unreal, i_row, hidden_keys.real
            b_dk, b_dv = fused_step(n_tiles, rings, to_dq, b_dk, b_dv, i_hq, tokens, edge, of_keys, call, I_GROUP)
            n_tiles += 1
        # The result takes the place of V and K, on its way out. V has been read, K is by the other group, too.
        store_item(i, I_GROUP, v_ring, dv, b_dv, hidden_keys.real, call)
        wait_for_each_other()
        store_item(i, I_GROUP, k_ring, dk, b_dk * scale, hidden_keys.real, call)
        store_wait(0)
        release(I_GROUP, k_ring)
        release(I_GROUP, v_ring)
        n_key_tiles += 2


@jit
def fused_step(n, rings, to_dq, b_dk, b_dv, i_hq, tokens, edge, of_keys, call, I_GROUP: gl.constexpr):
    """dK and dV with what the n-th tile of queries adds; what the keys add to its dQ goes to memory."""
    q_ring, k_ring, v_ring, do_ring, rows_ring = rings
    ds_ring, dq_ring, dq = to_dq
    _, i_q, i_b, _ = tokens
    unreal, i_row, real_keys = of_keys
    PARTS: gl.constexpr = q_ring.tiles.shape[3] // ROWS  # of the tile, of 64 queries each: all that registers can hold
    dtype: gl.constexpr = q_ring.tiles.dtype
    b_zero = gl.zeros([ROWS, ROWS], gl.float32, layout=accumulator(ROWS))
    i_slot = opaque(I_GROUP)  # or else the addresses of all parts of K and V are kept in registers
    t_k, t_v = tile_in(i_slot, k_ring), tile_in(i_slot, v_ring)
    t_ds = tile_in(2 * n + I_GROUP, ds_ring)
    wait_full(n, q_ring)
    for i_part in gl.static_range(PARTS):
        t_q = queries_of(tile_in(n, q_ring), i_part)
        b_s = warpgroup_mma(t_k, t_q.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if i_part == 0:
            wait_full(n, do_ring)
        t_do = queries_of(tile_in(n, do_ring), i_part)
        b_dp = warpgroup_mma(t_v, t_do.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        b_p = weights_of_keys(n, rows_ring, b_s, tokens, edge, call, i_part, real_keys is None)
        b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
        b_ds = b_p * (b_dp - row_in(n, rows_ring, DELTA, i_part, ROWS))
        if unreal:
            # Of what is hidden V may be NaN, and P infinite.
            b_ds = of_real(b_ds, i_row, i_b, call.n_k, real_keys)
        b_left = gl.convert_layout(b_p.to(dtype), left_operand(do_ring.tiles.shape[4]))
        b_dv = warpgroup_mma(b_left, t_do, b_dv, is_async=True)
        part_of(t_ds, i_part, ROWS).store(b_ds.to(dtype))
        b_left = gl.convert_layout(b_ds.to(dtype), left_operand(q_ring.tiles.shape[4]))
        if i_part < PARTS - 1:
            b_dk = warpgroup_mma(b_left, t_q, b_dk, is_async=True)
    fence_async_shared()
    # Once a step is enough: dS of step n is overwritten in step n + 2, after both have come here in step n + 1, and to
    # that they come with their products of step n done.
    wait_for_each_other()
    b_dq = dq_coming(n, ds_ring, k_ring, I_GROUP)
    b_dk = warpgroup_mma(b_left, t_q, b_dk, is_async=True)
    b_dv, b_dq = warpgroup_mma_wait(1, deps=(b_dv, b_dq))
    release(n, do_ring)
    store_wait(0)
    add_to_dq(dq_ring, dq, b_dq, i_b, i_hq, i_q, I_GROUP, PARTS == 1)
    b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
    release(n, q_ring)
    return b_dk, b_dv


@jit
def queries_of(tile, I_PART: gl.constexpr):
    """A part of a tile, 64 queries; only a tile of 64 columns has several."""
    if tile.shape[0] == ROWS:
        return tile
    else:
        return part_of(tile, I_PART, ROWS)


@jit
def dq_coming(n, ds_ring, k_ring, I_GROUP: gl.constexpr):
    """Share of 128 keys in a half of the n-th tile's dQ, [64, 64]: columns of it or, if it has just 64, rows."""
    BY_COLUMNS: gl.constexpr = k_ring.tiles.shape[4] > 64
    b_dq = gl.zeros([ROWS, 64], gl.float32, layout=accumulator(64))
    for i_keys in gl.static_range(2):
        t_ds = part_of(tile_in(2 * n + i_keys, ds_ring), 0 if BY_COLUMNS else I_GROUP, ROWS)
        t_k = part_of(tile_in(opaque(i_keys), k_ring), I_GROUP if BY_COLUMNS else 0, ROWS)
        b_dq = warpgroup_mma(t_ds.permute((1, 0)), t_k, b_dq, use_acc=i_keys > 0, is_async=True)
    return b_dq


@jit
def add_to_dq(ring, desc, b_dq, i_b, i_h, i_q, I_GROUP: gl.constexpr, BY_COLUMNS: gl.constexpr):
    """Adds a half of the computed part of dQ in memory, from query `i_q` on, asynchronously."""
    tile_in(I_GROUP, ring).store(b_dq)
    fence_async_shared()
    if BY_COLUMNS:
        at = [i_b.to(gl.int32), i_h.to(gl.int32), i_q, 64 * I_GROUP]
    else:
        at = [i_b.to(gl.int32), i_h.to(gl.int32), i_q + ROWS * I_GROUP, 0]
    tma_reduce_add(desc, at, ring.tiles.index(I_GROUP))
