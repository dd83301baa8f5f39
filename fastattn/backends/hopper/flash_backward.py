"""Backward that gives the same bits on every run: dK with dV and dQ as two kernels, so that no sum needs atomics.

The formulas are those of ..triton.flash_backward. As in FlashAttention-3 (Shah et al., 2024), one warp loads tiles by
TMA and two warp groups compute. P and dS stay in registers, and the product that ends in dK or dQ is issued together
with the first one of the next tile: the tensor cores have work while weights are computed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ... import spec as what
from ..triton.flash_backward import compute_rows, constant_where_nothing_is_seen
from ..triton.launches import Launches, kind_of, repeated
from ..triton.recompute import Rows
from ..triton.rules import Rules, rules_of
from ..triton.tiles import Heads, heads, readable
from ..triton.visibility import (
    Visibility,
    as_column,
    as_row,
    is_edge,
    keep,
    keys_at,
    position_of_first_query,
    queries_at,
    query_range,
    range_in_table,
    real_span,
    real_tokens,
)
from .configs import ROWS_OF_GROUP, dk_dv_config, dq_config, padded_head_dim
from .flash_forward import ROWS, Call, work_item
from .gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    store_wait,
    tma_load,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .order import Order, item_at, l2_group_of, programs_for
from .rings import (
    BYTES_OF_CHUNK,
    Ring,
    accumulator,
    described,
    descriptor,
    in_chunks,
    left_operand,
    load,
    load_real_rows,
    loadable,
    new_ring,
    release,
    rings_are_ready,
    slot_of,
    tile_in,
    wait_full,
)


class Inputs(NamedTuple):
    """Tensors that the kernels read by TMA: [B, H, N, D], and rows of every query, [B, H, ROWS_OF_QUERY, n_q]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    rows: Tensor


REFERENCE: gl.constexpr = gl.constexpr(0)
REST_LOG2: gl.constexpr = gl.constexpr(1)
DELTA: gl.constexpr = gl.constexpr(2)
"""The rows of `Inputs.rows`, which `Rows` explains."""
ROWS_OF_QUERY: gl.constexpr = gl.constexpr(4)
"""How many there are: one more, since a tile has a power of two."""


class Hidden(NamedTuple):
    """Tokens that padding hides, and how a tile with such tokens is loaded; None where padding hides nothing."""

    real: Tensor | None  # bool [B, n]: the queries or keys that are loaded tile by tile
    spans: Tensor | None  # int32 [B, 3], see preparation.real_spans
    x: Heads | None  # Q or K, `in_chunks`
    dx: Heads | None  # dO, where x is Q


_NONE_HIDDEN = Hidden(None, None, None, None)


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
    """(dq, dk, dv, None, None, None); None, and not computed, where `output_mask` does not ask for it."""
    do = torch.zeros_like(o, memory_format=torch.contiguous_format) if do is None else do
    given = q, k, v, o, do, lse, constant_where_nothing_is_seen(dlse, lse)
    kind = kind_of((backward, output_mask), given, spec)
    outputs = repeated(kind, given, spec) or _launched(kind, given, spec, output_mask)
    return *outputs[:3], None, None, None


def _launched(
    kind: tuple, given: tuple[Tensor | None, ...], spec: what.Spec, output_mask: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """What the kernels write: dq, dk, dv, and rows of every query."""
    wanted = zip(given[:3], output_mask[:3], strict=True)
    dq, dk, dv = (loadable(torch.empty_like(x)) if is_wanted else None for x, is_wanted in wanted)
    rows = empty_rows(given[5])
    launches, inputs = prepared(given, spec, (dq, dk, dv, rows))
    if dk is None or dv is None or dk_dv_config(larger_head_dim(inputs)).BOTH:
        compute_dk_dv(launches, dk, dv, inputs, spec.scale)
    else:
        compute_dk_dv(launches, dk, None, inputs, spec.scale)
        compute_dk_dv(launches, None, dv, inputs, spec.scale)
    compute_dq(launches, dq, inputs, spec.scale)
    launches.keep(kind, *rules_arguments(inputs))
    return dq, dk, dv, rows


def empty_rows(lse: Tensor) -> Tensor:
    """Memory for the `rows` of `Inputs`."""
    B, H, n_q = lse.shape
    per_chunk = BYTES_OF_CHUNK // lse.element_size()
    return lse.new_empty(B, H, ROWS_OF_QUERY.value, triton.cdiv(n_q, per_chunk) * per_chunk)[..., :n_q]


def prepared(
    given: tuple[Tensor | None, ...], spec: what.Spec, outputs: tuple[Tensor | None, ...], *zeroed: Tensor
) -> tuple[Launches, Inputs]:
    """The launches of a call, of which the rows of every query are done, and the inputs of the others.

    Args:
        given: q, k, v, o, do, lse, dlse.
        outputs: that the launches write; the fourth are the rows.
        zeroed: those among them that are 0.
    """
    q, k, v, o, do, lse, dlse = given
    q, k, v, o, do, lse = loadable(q), loadable(k), loadable(v), readable(o), loadable(do), lse.contiguous()
    inputs = Inputs(q, k, v, do, outputs[3])
    rules = rules_of(spec, *rules_arguments(inputs))
    launches = Launches(rules, given, (q, k, v, o, do, lse, dlse), outputs, zeroed)
    of_rows = launches.made(_rows_in, (inputs.rows,))
    compute_rows(launches, of_rows, heads(q), heads(k), heads(o), heads(do), lse, dlse)
    return launches, inputs


def rules_arguments(inputs: Inputs) -> tuple[int, int, torch.dtype, torch.dtype]:
    """What `rules_of` is told of a call."""
    return inputs.q.shape[2], inputs.k.shape[2], inputs.v.dtype, torch.bool


def _rows_in(rows: Tensor) -> Rows:
    return Rows(*rows.unbind(2)[:3])


def compute_dk_dv(launches: Launches, dk: Tensor | None, dv: Tensor | None, inputs: Inputs, scale: float) -> None:
    """Computes dK and dV, each unless it is None."""
    if dk is None and dv is None:
        return
    q, k, v, do, rows = inputs
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    block_qk, block_v = padded_head_dim(d_qk), padded_head_dim(d_v)
    config, rules = dk_dv_config(larger_head_dim(inputs)), launches.rules
    # A hidden query adds nothing, since its lse is +inf; the gradient of a hidden key is thrown away.
    visible = launches.made(visible_to_key_tiles, (rules,), config.BLOCK_M, config.block_n)
    n_tiles, n_heads = triton.cdiv(n_k, config.block_n), B * H_kv
    n_programs = programs_for(n_tiles * n_heads, config.persistent, q.device)
    launches.launch(
        dk_dv_kernel,
        n_programs,
        descriptor(launches, q, config.BLOCK_M, block_qk),
        descriptor(launches, k, ROWS_OF_GROUP, block_qk),
        descriptor(launches, v, ROWS_OF_GROUP, block_v),
        descriptor(launches, do, config.BLOCK_M, block_v),
        descriptor_of_rows(launches, rows, config.BLOCK_M),
        None if dk is None else descriptor(launches, dk, ROWS_OF_GROUP, block_qk),
        None if dv is None else descriptor(launches, dv, ROWS_OF_GROUP, block_v),
        visible,
        launches.made(hidden_queries, (rules, q, do)),
        launches.made(real_keys_of, (rules,)),
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


def compute_dq(launches: Launches, dq: Tensor | None, inputs: Inputs, scale: float) -> None:
    """Computes dQ, unless it is None."""
    if dq is None:
        return
    q, k, v, do, rows = inputs
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    block_qk, block_v = padded_head_dim(d_qk), padded_head_dim(d_v)
    config, rules = dq_config(larger_head_dim(inputs)), launches.rules
    # The gradient of a hidden query is thrown away.
    visible = launches.made(_visible_to_query_tiles, (rules,), config.block_m)
    n_tiles, n_heads = triton.cdiv(n_q, config.block_m), B * H
    n_programs = programs_for(n_tiles * n_heads, config.persistent, q.device)
    launches.launch(
        dq_kernel,
        n_programs,
        descriptor(launches, q, ROWS_OF_GROUP, block_qk),
        descriptor(launches, k, config.BLOCK_N, block_qk),
        descriptor(launches, v, config.BLOCK_N, block_v),
        descriptor(launches, do, ROWS_OF_GROUP, block_v),
        rows,
        rows.stride(2),
        descriptor(launches, dq, ROWS_OF_GROUP, block_qk),
        visible,
        launches.made(hidden_keys, (rules, k)),
        launches.made(real_queries_of, (rules,)),
        scale,
        scale * what.LOG2E,
        n_q,
        n_k,
        n_tiles * n_heads,
        n_programs,
        n_tiles,
        n_heads,
        l2_group_of(n_heads, H // H_kv, n_k * (d_qk + d_v) * k.element_size(), visible),
        H,
        GROUP=H // H_kv,
        D_QK=d_qk,
        **config.options(),
    )


def visible_to_key_tiles(rules: Rules, block_m: int, block_n: int) -> Visibility:
    """What is seen, but for padding, by programs that take `block_n` keys each."""
    return rules.visible._replace(real_queries=None, real_keys=None).in_key_tiles(block_m, block_n)


def _visible_to_query_tiles(rules: Rules, block_m: int) -> Visibility:
    return rules.visible._replace(real_queries=None).in_tiles(block_m)


def real_queries_of(rules: Rules) -> Tensor | None:
    """Bool [B, n_q], or None where padding hides no query."""
    return rules.visible.real_queries


def real_keys_of(rules: Rules) -> Tensor | None:
    """Bool [B, n_k], or None where padding hides no key."""
    return rules.visible.real_keys


def hidden_queries(rules: Rules, q: Tensor, do: Tensor) -> Hidden:
    """The queries that padding hides."""
    real = rules.visible.real_queries
    return _NONE_HIDDEN if real is None else Hidden(real, rules.visible.spans()[0], in_chunks(q), in_chunks(do))


def hidden_keys(rules: Rules, k: Tensor) -> Hidden:
    """The keys that padding hides."""
    real = rules.visible.real_keys
    return _NONE_HIDDEN if real is None else Hidden(real, rules.visible.spans()[1], in_chunks(k), None)


def larger_head_dim(inputs: Inputs) -> int:
    """The larger one of keys and values, padded."""
    return padded_head_dim(max(inputs.q.shape[3], inputs.v.shape[3]))


def descriptor_of_rows(launches: Launches, rows: Tensor, block_m: int) -> TensorDescriptor:
    """The rows of `block_m` queries at a time; 0 past the last one, where dO is 0 and nothing is added."""
    return launches.made(described, (rows,), _form_of_rows(rows.shape, rows.stride(), rows.dtype, block_m))


@functools.lru_cache(maxsize=4096)
def _form_of_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block_m: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    empty = torch.empty(0, dtype=dtype)
    return TensorDescriptor(empty, list(shape), list(strides), [1, 1, shape[2], block_m], layout)


@jit
def has_hidden(i_tile, i_b, n, spans, BLOCK: gl.constexpr):
    """Whether padding hides tokens of a tile. They may be NaN, which a weight of 0 does not make 0."""
    first, hole, _ = real_span(spans, n, i_b)
    return (i_tile * BLOCK < first) | (gl.minimum((i_tile + 1) * BLOCK, n) > hole)


@jit(do_not_specialize=["n_q", "n_k", "n_items", "n_programs", "n_tiles", "n_heads", "l2_group"])
def dk_dv_kernel(
    q,
    k,
    v,
    do,
    rows,
    dk,
    dv,
    visible: Visibility,
    hidden: Hidden,
    real_keys,
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
    tensors = q, k, v, do, rows
    hidden_keys = Hidden(None, None, None, None)  # what comes of them is in rows of their own
    gradients = dk, dv
    q_ring, do_ring, rows_ring = new_ring(q, Q_SLOTS, 2), new_ring(do, DO_SLOTS, 2), new_ring(rows, DO_SLOTS, 2)
    rows_ring = Ring(rows_ring.tiles, rows_ring.full, do_ring.empty)  # released together
    k_ring = new_ring(k, 2, 1)  # a slot for each warp group
    v_ring = k_ring
    if dk is not None:
        v_ring = new_ring(v, 2, 1)
    elif v.block_shape[3] != k.block_shape[3]:
        v_ring = Ring(new_ring(v, 2, 1).tiles, k_ring.full, k_ring.empty)  # where dV fits on its way out
    rings = q_ring, k_ring, v_ring, do_ring, rows_ring
    rings_are_ready()
    warp_specialize(
        [
            (consume_dk_dv, (rings, gradients, real_keys, scale, call, 0, GROUP)),
            (consume_dk_dv, (rings, gradients, real_keys, scale, call, 1, GROUP)),
            (produce_dk_dv, (rings, tensors, gradients, hidden, hidden_keys, call, gl.program_id(0), GROUP, D_QK, D_V)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@jit
def key_item(i, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The i-th item: (tile, key head, batch entry, position of query 0, query tiles as `query_range` has them)."""
    n_q, n_k = call.n_q, call.n_k
    i_tile, i_h, i_b = item_at(i, call.order)
    i_n = call.order.n_tiles - 1 - i_tile  # under a causal mask the first keys are seen most
    q_offset = position_of_first_query(call.visible, i_b)
    if call.visible.key_ranges is None:
        tile_range = query_range(i_n, i_b, q_offset, n_q, n_k, call.visible, BLOCK_M, BLOCK_N)
    else:  # those of `query_ranges`
        tile_range = range_in_table(call.visible.key_ranges, i_b * call.order.n_tiles + i_n)
    return i_n, i_h, i_b, q_offset, tile_range


@jit
def produce_dk_dv(
    rings,
    tensors,
    gradients,
    hidden,
    hidden_keys,
    call,
    first,
    GROUP: gl.constexpr,
    D_QK: gl.constexpr,
    D_V: gl.constexpr,
):
    """The warp that loads: every tile that the warp groups read, in the order in which they do."""
    q_ring, k_ring, v_ring, do_ring, rows_ring = rings
    q, k, v, do, rows = tensors
    dk = gradients[0]
    n_q = call.n_q
    BLOCK_M: gl.constexpr = q_ring.tiles.shape[3]
    BLOCK_N: gl.constexpr = 2 * ROWS
    n_tiles = 0  # of queries, that went through the rings
    n_key_tiles = 0
    for i in range(first, call.order.n_items, call.order.n_programs):
        i_n, i_h, i_b, _, tile_range = key_item(i, call, BLOCK_M, BLOCK_N)
        for i_group in range(2):
            i_row = i_n * BLOCK_N + i_group * ROWS
            n = n_key_tiles + i_group
            if hidden_keys.real is None:
                load(n, k_ring, k, i_b, i_h, i_row)
            elif has_hidden(i_n * 2 + i_group, i_b, call.n_k, hidden_keys.spans, ROWS):
                load_real_rows(n, k_ring, hidden_keys.x, i_b, i_h, i_row, call.n_k, hidden_keys.real, D_QK)
            else:
                load(n, k_ring, k, i_b, i_h, i_row)
            if dk is not None:
                load(n, v_ring, v, i_b, i_h, i_row)
        n_key_tiles += 2
        for i_step in range((tile_range[3] - tile_range[0]) * GROUP):
            i_m, i_hq = tile_range[0] + i_step // GROUP, i_h * GROUP + i_step % GROUP
            if hidden.real is None:
                load(n_tiles, q_ring, q, i_b, i_hq, i_m * BLOCK_M)
                load(n_tiles, do_ring, do, i_b, i_hq, i_m * BLOCK_M)
            elif has_hidden(i_m, i_b, n_q, hidden.spans, BLOCK_M):
                load_real_rows(n_tiles, q_ring, hidden.x, i_b, i_hq, i_m * BLOCK_M, n_q, hidden.real, D_QK)
                load_real_rows(n_tiles, do_ring, hidden.dx, i_b, i_hq, i_m * BLOCK_M, n_q, hidden.real, D_V)
            else:
                load(n_tiles, q_ring, q, i_b, i_hq, i_m * BLOCK_M)
                load(n_tiles, do_ring, do, i_b, i_hq, i_m * BLOCK_M)
            load_rows(n_tiles, rows_ring, rows, i_b, i_hq, i_m * BLOCK_M)
            n_tiles += 1


@jit
def load_rows(n, ring, desc, i_b, i_h, i_q):
    """Loads the rows of the queries from `i_q` on as tile n, [4, M], asynchronously.

    The slot is free when that of dO is.
    """
    slot = slot_of(n, ring)[0]
    mbarrier.expect(ring.full.index(slot), desc.block_shape[2] * desc.block_shape[3] * 4)
    tma_load(desc, [i_b.to(gl.int32), i_h.to(gl.int32), 0, i_q], ring.full.index(slot), ring.tiles.index(slot))


@jit
def consume_dk_dv(rings, gradients, real_keys, scale, call, I_GROUP: gl.constexpr, GROUP: gl.constexpr):
    """A warp group: 64 rows of dK and dV of every item, over the query tiles from the first one up."""
    q_ring, k_ring, v_ring, do_ring = rings[0], rings[1], rings[2], rings[3]
    dk, dv = gradients
    BLOCK_M: gl.constexpr = q_ring.tiles.shape[3]
    BLOCK_N: gl.constexpr = 2 * ROWS
    BLOCK_QK: gl.constexpr = q_ring.tiles.shape[4]
    BLOCK_V: gl.constexpr = do_ring.tiles.shape[4]
    n_key_tile = I_GROUP + 0  # they lie in the slot of this number
    n_tiles = 0
    for i in range(gl.program_id(0), call.order.n_items, call.order.n_programs):
        i_n, _, i_b, q_offset, tile_range = key_item(i, call, BLOCK_M, BLOCK_N)
        i_row = i_n * BLOCK_N + I_GROUP * ROWS
        o_k = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_M)))
        keys = keys_at(o_k, i_b, call.n_k, call.visible)
        b_dk = gl.zeros([ROWS, BLOCK_QK], gl.float32, layout=accumulator(BLOCK_QK))
        b_dv = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=accumulator(BLOCK_V))
        wait_full(n_key_tile, k_ring)
        if dk is not None:
            wait_full(n_key_tile, v_ring)
        for i_step in range((tile_range[3] - tile_range[0]) * GROUP):
            i_m = tile_range[0] + i_step // GROUP
            tokens = keys, i_m * BLOCK_M, i_b, q_offset
            edge = is_edge(i_m, tile_range)
            b_dk, b_dv = dk_dv_step(n_tiles, rings, b_dk, b_dv, gradients, tokens, edge, call, I_GROUP)
            n_tiles += 1
        # The tiles of K and V have been read: the result takes their place, on its way out.
        if dk is not None:
            store_item(i, I_GROUP, k_ring, dk, b_dk * scale, real_keys, call)
        if dv is not None:
            store_item(i, I_GROUP, v_ring, dv, b_dv, real_keys, call)
        store_wait(0)
        release(I_GROUP, k_ring)
        if dk is not None:
            release(I_GROUP, v_ring)
        n_key_tile += 2


@jit
def dk_dv_step(n, rings, b_dk, b_dv, gradients, tokens, edge, call, I_GROUP: gl.constexpr):
    """dK and dV with what the n-th tile of queries adds. Tiles lie the other way round than in the forward: [N, M]."""
    q_ring, k_ring, v_ring, do_ring, rows_ring = rings
    dk, dv = gradients
    BLOCK_M: gl.constexpr = q_ring.tiles.shape[3]
    dtype: gl.constexpr = q_ring.tiles.dtype
    b_zero = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=accumulator(BLOCK_M))
    i_slot = opaque(I_GROUP)  # or else the addresses of all parts of K and V are kept in registers
    t_k, t_v = tile_in(i_slot, k_ring), tile_in(i_slot, v_ring)
    wait_full(n, q_ring)
    t_q = tile_in(n, q_ring)
    b_s = warpgroup_mma(t_k, t_q.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    wait_full(n, do_ring)
    t_do = tile_in(n, do_ring)
    if dk is not None:
        b_dp = warpgroup_mma(t_v, t_do.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
    else:
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
    b_p = weights_of_keys(n, rows_ring, b_s, tokens, edge, call, 0, True)
    if dk is not None:
        b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
        b_ds = b_p * (b_dp - row_in(n, rows_ring, DELTA, 0, BLOCK_M))
    if dv is not None:
        b_left = gl.convert_layout(b_p.to(dtype), left_operand(do_ring.tiles.shape[4]))
        b_dv = warpgroup_mma(b_left, t_do, b_dv, is_async=True)
    if dk is not None:
        b_left = gl.convert_layout(b_ds.to(dtype), left_operand(q_ring.tiles.shape[4]))
        b_dk = warpgroup_mma(b_left, t_q, b_dk, is_async=True)
    if dk is not None and dv is not None:
        b_dv = warpgroup_mma_wait(1, deps=(b_dv,))
        release(n, do_ring)
        b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
        release(n, q_ring)
    else:
        if dv is not None:
            b_dv = warpgroup_mma_wait(0, deps=(b_dv,))
        else:
            b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
        release(n, do_ring)
        release(n, q_ring)
    return b_dk, b_dv


@jit
def weights_of_keys(n, rows_ring, b_s, tokens, edge, call, I_PART: gl.constexpr, OVERLAP: gl.constexpr):
    """P [N, M] of a part of the n-th tile of queries, as many as `b_s` has, once their rows are there.

    OVERLAP: whether something keeps ptxas from moving a wait for products that follows to before the exponentials.
    """
    keys, i_q, i_b, q_offset = tokens
    PART: gl.constexpr = b_s.shape[1]
    # Queries past the last one have no dO, and keys past theirs are not written: only limits need a mask.
    IS_LIMITED: gl.constexpr = (
        call.visible.left is not None or call.visible.right is not None or call.visible.documents_q is not None
    )
    wait_full(n, rows_ring)
    b_s -= row_in(n, rows_ring, REFERENCE, I_PART, PART)
    b_p = gl.exp2(b_s * call.scale_log2 - row_in(n, rows_ring, REST_LOG2, I_PART, PART))
    if IS_LIMITED and edge:
        o_m = gl.arange(0, PART, layout=gl.SliceLayout(0, accumulator(PART)))
        if call.visible.documents_q is None:
            # In two steps, of which the second adds a constant: or else all of them are kept in registers.
            o_q = i_q + I_PART * PART + (o_m & 7) + (o_m & -8)
        else:
            o_q = i_q + I_PART * PART + o_m
        queries = queries_at(o_q, i_b, call.n_q, q_offset, call.visible)
        pairs = as_row(queries), as_column(keys), i_b, 0, call.n_q, call.n_k
        b_p = gl.where(keep(pairs, call.visible), b_p, 0.0)
    if OVERLAP and not IS_LIMITED:  # a branch for the mask would do, too
        wait_full(n, rows_ring)  # they are
    return b_p


@jit
def row_in(n, ring, ROW: gl.constexpr, I_PART: gl.constexpr, PART: gl.constexpr):
    """A row of PART queries of the n-th tile, [1, PART], to be used with products."""
    return tile_in(n, ring).slice(ROW, 1).slice(I_PART * PART, PART, dim=1).load(accumulator(PART))


@jit
def store_item(i, I_GROUP: gl.constexpr, ring, desc, b_x, real_keys, call):
    """Writes rows of dK or dV of the i-th item, asynchronously; the destination of each is computed anew."""
    i_tile, i_h, i_b = item_at(opaque(i), call.order)
    i_row = (call.order.n_tiles - 1 - i_tile) * 2 * ROWS + I_GROUP * ROWS
    store(I_GROUP, ring, desc, i_b, i_h, i_row, of_real(b_x, i_row, i_b, call.n_k, real_keys))


@jit
def store(n, ring, desc, i_b, i_h, i_row, b_x):
    """Writes an accumulator to the rows of a head from `i_row` on, as far as they exist, asynchronously, by a tile."""
    tile_in(n, ring).store(b_x.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [i_b.to(gl.int32), i_h.to(gl.int32), i_row, 0], ring.tiles.index(slot_of(n, ring)[0]))


@jit
def of_real(b_x, i_row, i_b, n, real):
    """The rows of an accumulator from `i_row` on, 0 where padding hides them."""
    o_row = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(b_x.shape[1])))
    return gl.where(gl.expand_dims(real_tokens(o_row, n, real, i_b), 1), b_x, 0.0)


@jit(do_not_specialize=["s_row", "n_q", "n_k", "n_items", "n_programs", "n_tiles", "n_heads", "l2_group"])
def dq_kernel(
    q,
    k,
    v,
    do,
    rows,
    s_row,
    dq,
    visible: Visibility,
    hidden: Hidden,
    real_queries,
    scale,
    scale_log2,
    n_q,
    n_k,
    n_items,
    n_programs,
    n_tiles,
    n_heads,
    l2_group,
    H,
    GROUP: gl.constexpr,
    D_QK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """A program takes every so many-th item: 128 queries of a head, over the key tiles that they see."""
    call = Call(visible, scale_log2, n_q, n_k, Order(n_items, n_programs, n_tiles, n_heads, l2_group, H))
    tensors = q, k, v, do
    # Each warp group has a slot for its queries.
    rings = new_ring(q, 2, 1), new_ring(k, K_SLOTS, 2), new_ring(v, V_SLOTS, 2), new_ring(do, 2, 1)
    rings_are_ready()
    warp_specialize(
        [
            (consume_dq, (rings, rows, s_row, dq, real_queries, scale, call, 0)),
            (consume_dq, (rings, rows, s_row, dq, real_queries, scale, call, 1)),
            (produce_dq, (rings, tensors, hidden, call, GROUP, D_QK)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@jit
def produce_dq(rings, tensors, hidden, call, GROUP: gl.constexpr, D_QK: gl.constexpr):
    """The warp that loads: every tile that the warp groups read, in the order in which they do."""
    q_ring, k_ring, v_ring, do_ring = rings
    q, k, v, do = tensors
    n_k = call.n_k
    BLOCK_M: gl.constexpr = 2 * ROWS
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    n_tiles = 0  # of keys, that went through the rings
    n_query_tiles = 0
    for i in range(gl.program_id(0), call.order.n_items, call.order.n_programs):
        i_m, i_h, i_b, _, tile_range = work_item(i, call, BLOCK_M, BLOCK_N)
        i_h_kv = i_h // GROUP
        for i_group in gl.static_range(2):
            load(n_query_tiles + i_group, q_ring, q, i_b, i_h, i_m * BLOCK_M + i_group * ROWS)
            load(n_query_tiles + i_group, do_ring, do, i_b, i_h, i_m * BLOCK_M + i_group * ROWS)
        n_query_tiles += 2
        for i_step in range(tile_range[3] - tile_range[0]):
            i_n = tile_range[3] - 1 - i_step
            if hidden.real is None:
                load(n_tiles, k_ring, k, i_b, i_h_kv, i_n * BLOCK_N)
            elif has_hidden(i_n, i_b, n_k, hidden.spans, BLOCK_N):
                load_real_rows(n_tiles, k_ring, hidden.x, i_b, i_h_kv, i_n * BLOCK_N, n_k, hidden.real, D_QK)
            else:
                load(n_tiles, k_ring, k, i_b, i_h_kv, i_n * BLOCK_N)
            load(n_tiles, v_ring, v, i_b, i_h_kv, i_n * BLOCK_N)
            n_tiles += 1


@jit
def consume_dq(rings, rows, s_row, dq, real_queries, scale, call, I_GROUP: gl.constexpr):
    """A warp group: 64 rows of dQ of every item, over the key tiles from the last one down."""
    q_ring, k_ring, do_ring = rings[0], rings[1], rings[3]
    n_q = call.n_q
    BLOCK_M: gl.constexpr = 2 * ROWS
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    BLOCK_QK: gl.constexpr = k_ring.tiles.shape[4]
    n_query_tile = I_GROUP + 0  # they lie in the slot of this number
    n_tiles = 0
    for i in range(gl.program_id(0), call.order.n_items, call.order.n_programs):
        i_m, i_h, i_b, q_offset, tile_range = work_item(i, call, BLOCK_M, BLOCK_N)
        i_row = i_m * BLOCK_M + I_GROUP * ROWS
        o_q = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_N)))
        p_row = rows + (i_b * call.order.H + i_h) * ROWS_OF_QUERY * s_row + o_q
        b_reference = gl.load(p_row + REFERENCE * s_row, mask=o_q < n_q, other=0.0)
        b_rest_log2 = gl.load(p_row + REST_LOG2 * s_row, mask=o_q < n_q, other=float("inf"))
        b_delta = gl.load(p_row + DELTA * s_row, mask=o_q < n_q, other=0.0)
        queries = queries_at(o_q, i_b, n_q, q_offset, call.visible)
        of_rows = queries, gl.expand_dims(b_reference, 1), gl.expand_dims(b_rest_log2, 1), gl.expand_dims(b_delta, 1)
        b_dq = gl.zeros([ROWS, BLOCK_QK], gl.float32, layout=accumulator(BLOCK_QK))
        wait_full(n_query_tile, q_ring)
        wait_full(n_query_tile, do_ring)
        for i_step in range(tile_range[3] - tile_range[0]):
            i_n = tile_range[3] - 1 - i_step
            edge = is_edge(i_n, tile_range)
            b_dq = dq_step(n_tiles, rings, b_dq, of_rows, i_n, i_b, edge, call, I_GROUP)
            n_tiles += 1
        release(I_GROUP, do_ring)
        # The tile of Q has been read: the result takes its place, on its way out.
        i_m, i_h, i_b = item_at(opaque(i), call.order)
        i_row = i_m * BLOCK_M + I_GROUP * ROWS
        store(I_GROUP, q_ring, dq, i_b, i_h, i_row, of_real(b_dq * scale, i_row, i_b, n_q, real_queries))
        store_wait(0)
        release(I_GROUP, q_ring)
        n_query_tile += 2


@jit
def dq_step(n, rings, b_dq, of_rows, i_n, i_b, edge, call, I_GROUP: gl.constexpr):
    """dQ with what the n-th tile of keys adds."""
    q_ring, k_ring, v_ring, do_ring = rings
    queries, b_reference, b_rest_log2, b_delta = of_rows
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=accumulator(BLOCK_N))
    i_slot = opaque(I_GROUP)  # or else the addresses of all parts of Q and dO are kept in registers
    t_q, t_do = tile_in(i_slot, q_ring), tile_in(i_slot, do_ring)
    wait_full(n, k_ring)
    t_k = tile_in(n, k_ring)
    b_s = warpgroup_mma(t_q, t_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    wait_full(n, v_ring)
    b_dp = warpgroup_mma(t_do, tile_in(n, v_ring).permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    b_p = gl.exp2((b_s - b_reference) * call.scale_log2 - b_rest_log2)
    wait_full(n, v_ring)  # it is: see OVERLAP of `weights_of_keys`
    b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
    release(n, v_ring)
    b_ds = b_p * (b_dp - b_delta)
    if edge:
        # Of what is hidden, V may be NaN, and P infinite.
        o_k = i_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, accumulator(BLOCK_N)))
        keys = keys_at(o_k, i_b, call.n_k, call.visible)
        pairs = as_column(queries), as_row(keys), i_b, 0, call.n_q, call.n_k
        b_ds = gl.where(keep(pairs, call.visible), b_ds, 0.0)
    b_left = gl.convert_layout(b_ds.to(k_ring.tiles.dtype), left_operand(k_ring.tiles.shape[4]))
    b_dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(b_left, t_k, b_dq, is_async=True),))
    release(n, k_ring)
    return b_dq
