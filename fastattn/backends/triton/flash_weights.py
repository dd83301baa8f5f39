"""The weights P = exp(score - lse) themselves, recomputed tile by tile as in the backward.

Averaged over heads, summed over queries, or the largest of each query: none of them is in memory for all pairs, but
where the caller asks for that.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ...spec import Spec
from .configs import Apart, config_for, padded_head_dim
from .dropout import kept
from .flash_backward import compute_rows
from .flash_forward import forward
from .launches import Launches
from .recompute import Rows, load_rows
from .recompute import weights as weights_of_tile
from .rules import Rules, rules_of
from .scores import scores
from .tiles import Heads, dot, dot_precision, head_of, heads, load_tile, program_share, readable
from .visibility import (
    anything,
    as_column,
    as_row,
    hide,
    key_range,
    key_tokens,
    loop_bounds,
    position_of_first_query,
    query_range,
    query_tokens,
    shown,
    tile_of_step,
)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] averaged over heads or [B, H, n_q, n_k]."""
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    rules, shape = rules_of(spec, n_q, n_k, q.dtype), _shape(q, k)
    rows, config = _rows(q, k, lse, spec, rules), config_for("dq", q, shape["BLOCK_QK"], rules.heavy_terms)
    result = q.new_empty(B, 1 if average_heads else H, n_q, n_k)
    programs = result.shape[:2].numel() * triton.cdiv(n_q, config.BLOCK_M) * triton.cdiv(n_k, config.BLOCK_N)
    arguments = (heads(readable(q)), heads(readable(k)), rows, heads(result), rules)
    scalars = (result.shape[1], H, n_q, n_k)
    Launches(rules).launch(weights_kernel, programs, *arguments, *scalars, **shape, **config._asdict())
    return result[:, 0] if average_heads else result


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    rules, shape = rules_of(spec, n_q, n_k, q.dtype), _shape(q, k)
    rows, config = _rows(q, k, None, spec, rules), config_for("dk_dv", q, shape["BLOCK_QK"], rules.heavy_terms)
    config = config.dv if isinstance(config, Apart) else config
    result = q.new_empty(B, H, n_k, dtype=torch.float32)
    arguments = (heads(readable(q)), heads(readable(k)), rows, result, rules, H, n_q, n_k)
    Launches(rules).launch(
        received_kernel, B * H * triton.cdiv(n_k, config.BLOCK_N), *arguments, **shape, **config._asdict()
    )
    return result


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    rules, shape = rules_of(spec, n_q, n_k, q.dtype), _shape(q, k)
    config = config_for("top_keys", q, shape["BLOCK_QK"], rules.heavy_terms)
    places, most = triton.next_power_of_2(max(min(top_k, n_k), 2)), tl.TRITON_MAX_TENSOR_NUMEL // config.BLOCK_M
    if places > most:
        raise NotImplementedError(f"backend 'triton' takes top_k up to {most} of as many keys, got {top_k}")
    rows, result = _rows(q, k, None, spec, rules), q.new_empty(B, H, n_q, places, dtype=torch.int64)
    arguments = (heads(readable(q)), heads(readable(k)), rows, result, rules, H, n_q, n_k)
    programs = B * H * triton.cdiv(n_q, config.BLOCK_M)
    Launches(rules).launch(top_keys_kernel, programs, *arguments, **shape, **config._asdict(), TOP_K=places)
    packed = result.sort(dim=-1, descending=True).values[..., :top_k]
    packed = pad(packed, (0, top_k - packed.shape[3]), value=-1)
    keys = (2**32 - 1 - (packed & (2**32 - 1))).masked_fill(packed < 0, -1)
    return (packed >> 32).clamp(min=0).int().view(torch.float32), keys


def _shape(q: Tensor, k: Tensor) -> dict[str, int | str]:
    """The constants of these kernels."""
    D = q.shape[3]
    return {
        "GROUP": q.shape[1] // max(k.shape[1], 1),
        "D_QK": D,
        "BLOCK_QK": padded_head_dim(D, q),
        "PRECISION": dot_precision(q),
    }


def _rows(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, rules: Rules) -> Rows:
    """Statistics of each query that its scores are measured from."""
    if lse is None:
        _, lse = forward(q, k, k[..., :0], replace(spec, dropout_p=0.0, seed=None))
    lse, no_o = lse.contiguous(), heads(q[..., :0])
    rows = Rows(*(torch.empty_like(lse) for _ in Rows._fields))
    compute_rows(Launches(rules), rows, heads(readable(q)), heads(readable(k)), no_o, no_o, lse, None)
    return rows


@triton.jit(do_not_specialize=["n_q", "n_k"])
def weights_kernel(
    q: Heads,
    k: Heads,
    rows: Rows,
    out: Heads,
    rules: Rules,
    H_OUT,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes a tile of weights, the average of H / H_OUT heads, and writes zeros where none is seen."""
    visible, dropout = rules.visible, rules.dropout
    n_key_tiles = tl.cdiv(n_k, BLOCK_N)
    i_tile, i_out, i_b = program_share(tl.cdiv(n_q, BLOCK_M) * n_key_tiles, H_OUT)
    i_m, i_n = i_tile // n_key_tiles, i_tile % n_key_tiles
    q_offset = position_of_first_query(visible, i_b)
    tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
    queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
    keys = key_tokens(i_n, i_b, n_k, visible, True, BLOCK_N)
    o_q, m_q, o_k, m_k = queries[0], queries[1], keys[0], keys[1]

    n_heads = H // H_OUT
    seen = (i_n >= tile_range[0]) & (i_n < tile_range[3])
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, tl.where(seen, n_heads, 0)):
        i_h = i_out * n_heads + i
        pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
        m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
        # [M, D], [N, D]
        b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
        b_k = load_tile(head_of(k, i_b, i_h // GROUP), k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
        b_reference, b_rest_log2, _ = as_column(load_rows(rows, (i_b * H + i_h) * n_q, o_q, m_q))
        # [M, N]
        b_p = weights_of_tile(b_q, b_k, b_reference, b_rest_log2, m_dense, pairs, rules, True, PRECISION)[0]
        if dropout.seed is not None:
            b_p = tl.where(kept(o_q, i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N), b_p * dropout.factor, 0.0)
        b_sum += b_p

    # A full tile is full for the real queries and keys only.
    m_real = m_q[:, None] & m_k[None, :]
    p_out = head_of(out, i_b, i_out) + o_q.to(tl.int64)[:, None] * out.s[2] + o_k[None, :]
    b_mean = tl.where(m_real, b_sum / n_heads, 0.0)
    tl.store(p_out, b_mean.to(out.data.dtype.element_ty), mask=(o_q < n_q)[:, None] & (o_k < n_k)[None, :])


@triton.jit(do_not_specialize=["n_q", "n_k"])
def received_kernel(
    q: Heads,
    k: Heads,
    rows: Rows,
    out,
    rules: Rules,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program sums what BLOCK_N keys receive from the queries of one head, over the query tiles that see them."""
    visible = rules.visible
    i_n, i_h, i_b = program_share(tl.cdiv(n_k, BLOCK_N), H)
    q_offset = position_of_first_query(visible, i_b)
    tile_range = query_range(i_n, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
    keys = key_tokens(i_n, i_b, n_k, visible, True, BLOCK_N)
    o_k, m_k = keys[0], keys[1]
    # [N, D]
    b_k = load_tile(head_of(k, i_b, i_h // GROUP), k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
    p_q = head_of(q, i_b, i_h)
    # One sum for each place in a tile: rounding errors do not pile up in one long chain.
    b_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for PARTIAL in tl.static_range(2):
        first, end = loop_bounds(tile_range, PARTIAL)
        for step in tl.range(first, end):
            i_m = tile_of_step(step, tile_range, PARTIAL)
            queries = query_tokens(i_m, i_b, n_q, q_offset, visible, PARTIAL, BLOCK_M)
            o_q, m_q = queries[0], queries[1]
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=False)
            if visible.dense.data is None or anything(m_dense):
                pairs = as_row(queries), as_column(keys), i_b, i_h, n_q, n_k
                # [M, D]
                b_q = load_tile(p_q, q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
                b_reference, b_rest_log2, _ = as_row(load_rows(rows, (i_b * H + i_h) * n_q, o_q, m_q))
                # [N, M]
                b_sums += weights_of_tile(
                    b_k, b_q, b_reference, b_rest_log2, m_dense, pairs, rules, PARTIAL, PRECISION
                )[0]
    # A full tile is full for the real keys only.
    tl.store(out + (i_b * H + i_h) * n_k + o_k, tl.where(m_k, tl.sum(b_sums, 1), 0.0), mask=o_k < n_k)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def top_keys_kernel(
    q: Heads,
    k: Heads,
    rows: Rows,
    out,
    rules: Rules,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """One program computes the TOP_K largest weights of BLOCK_M queries of a head, in no order.

    A weight and its key are one int64, the bits of the weight above those of -1 - key: weights are not negative, so
    that integers are ordered as they are, NaN above all, and equal weights by the key, the smaller one first. Negative
    ones stand for no key.
    """
    visible = rules.visible
    i_m, i_h, i_b = program_share(tl.cdiv(n_q, BLOCK_M), H)
    q_offset = position_of_first_query(visible, i_b)
    tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
    queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    # [M, D]
    b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
    p_k = head_of(k, i_b, i_h // GROUP)
    b_reference, b_rest_log2, _ = as_column(load_rows(rows, (i_b * H + i_h) * n_q, o_q, m_q))

    o_place = tl.arange(0, TOP_K)
    # [M, K]; all different, so that one of them can be replaced
    b_largest = tl.zeros([BLOCK_M, TOP_K], tl.int64) - 2 - o_place[None, :]
    b_smallest = tl.min(b_largest, 1)
    for PARTIAL in tl.static_range(2):
        first, end = loop_bounds(tile_range, PARTIAL)
        for step in tl.range(first, end):
            i_n = tile_of_step(step, tile_range, PARTIAL)
            keys = key_tokens(i_n, i_b, n_k, visible, PARTIAL, BLOCK_N)
            o_k, m_k = keys[0], keys[1]
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
            if visible.dense.data is None or anything(m_dense):
                pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
                # [N, D]
                b_k = load_tile(p_k, k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
                # [M, N]
                b_s, factor, _slope = scores(dot(b_q, tl.trans(b_k), None, PRECISION), pairs, rules.scoring)
                b_s = hide(b_s, float("-inf"), m_dense, pairs, visible, PARTIAL)
                b_s = tl.where(m_q[:, None] & m_k[None, :], b_s, float("-inf"))
                b_p = tl.exp2((b_s - b_reference) * factor - b_rest_log2)
                b_bits = b_p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                b_packed = (b_bits.to(tl.int64) << 32) | (0xFFFFFFFF - o_k.to(tl.int64))[None, :]
                b_packed = tl.where(b_s == float("-inf"), -(2**40), b_packed)
                b_candidate = tl.max(b_packed, 1)
                while anything(b_candidate > b_smallest):
                    m_replaced = (b_largest == b_smallest[:, None]) & (b_candidate > b_smallest)[:, None]
                    b_largest = tl.where(m_replaced, b_candidate[:, None], b_largest)
                    b_smallest = tl.min(b_largest, 1)
                    b_packed = tl.where(b_packed == b_candidate[:, None], -(2**40), b_packed)
                    b_candidate = tl.max(b_packed, 1)

    p_out = out + ((i_b * H + i_h) * n_q + o_q)[:, None] * TOP_K + o_place[None, :]
    tl.store(p_out, b_largest, mask=(o_q < n_q)[:, None])
