"""Backward: FlashAttention-2 (Dao, 2023, algorithm 2) as two kernels, dK with dV and dQ, so that no sum needs atomics.

Each recomputes the weights P from the lse: dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q,
where delta = rowsum(dO * O) - dlse. The split costs seven matrix products instead of five and gives the same bits on
every run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec
from .configs import config_for, padded_head_dim
from .dropout import kept
from .rules import Rules, rules_of
from .scores import scores_log2, sink_log2
from .tiles import (
    LOG2E,
    Heads,
    dot,
    dot_precision,
    head_of,
    heads,
    launch,
    load_tile,
    program_share,
    readable_heads,
    store_tile,
)
from .visibility import (
    as_column,
    as_row,
    is_edge,
    keep,
    key_range,
    key_tokens,
    position_of_first_query,
    query_range,
    query_tokens,
)

PRECISE_UP_TO_LOG2: tl.constexpr = tl.constexpr(16.0)
"""The rounding of an lse up to this costs a weight at most some 6 units in the last place."""


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dalibi_slopes, dsinks); None, and not computed, where `output_mask` does not ask for it."""
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    dq_wanted, dk_wanted, dv_wanted, _, _, dsinks_wanted = output_mask
    block_qk, block_v = padded_head_dim(d_qk, q), padded_head_dim(d_v, q)
    rules = rules_of(spec)
    q_heads, k_heads, v_heads = readable_heads(q), readable_heads(k), readable_heads(v)
    do_heads = readable_heads(torch.zeros_like(o) if do is None else do)

    shape = {
        "GROUP": H // max(H_kv, 1),
        "D_QK": d_qk,
        "D_V": d_v,
        "BLOCK_QK": block_qk,
        "BLOCK_V": block_v,
        "PRECISION": dot_precision(),
    }
    scalars = (H, n_q, n_k)
    lse = lse.contiguous()
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    rest_log2 = torch.empty_like(lse) if q.dtype == torch.float32 else None
    config = config_for("rows", q, max(block_qk, block_v))
    launch(
        rows_kernel,
        B * H * triton.cdiv(n_q, config.BLOCK_M),
        q_heads,
        k_heads,
        readable_heads(o),
        do_heads,
        lse,
        None if dlse is None else dlse.contiguous(),
        lse_log2,
        rest_log2,
        delta,
        rules,
        *scalars,
        **shape,
        **config._asdict(),
    )

    inputs = (q_heads, k_heads, v_heads, do_heads, lse_log2, rest_log2, delta)
    scalars = (rules, spec.scale, *scalars)
    dq = dk = dv = None
    if dk_wanted or dv_wanted:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        config = config_for("dk_dv", q, max(block_qk, block_v))
        programs = B * H_kv * triton.cdiv(n_k, config.BLOCK_N)
        launch(dk_dv_kernel, programs, *inputs, heads(dk), heads(dv), *scalars, **shape, **config._asdict())
    ds_of_rows = torch.empty_like(lse) if dsinks_wanted else None
    if dq_wanted or dsinks_wanted:
        dq = torch.empty_like(q)
        config = config_for("dq", q, max(block_qk, block_v))
        programs = B * H * triton.cdiv(n_q, config.BLOCK_M)
        launch(dq_kernel, programs, *inputs, heads(dq), ds_of_rows, *scalars, **shape, **config._asdict())

    dsinks = None
    if dsinks_wanted:
        p_sinks = weights_of_sinks(spec.sinks, lse_log2, rest_log2)
        delta = exact_delta(delta, dlse, lse, p_sinks, ds_of_rows)
        # A sink takes weight from the values and adds nothing: its dS is weight * (0 - delta).
        dsinks = -(p_sinks * delta).sum((0, 2)).to(spec.sinks.dtype)
    return dq, dk, dv, None, None, dsinks


def weights_of_sinks(sinks: Tensor, lse_log2: Tensor, rest_log2: Tensor | None) -> Tensor:
    """What each query gives to the sink of its head, [B, H, n_q]."""
    weight_log2 = sinks[:, None].to(lse_log2.dtype) * LOG2E.value - lse_log2
    return torch.exp2(weight_log2 if rest_log2 is None else weight_log2 - rest_log2)


def exact_delta(delta: Tensor, dlse: Tensor | None, lse: Tensor, p_sinks: Tensor, ds_of_rows: Tensor) -> Tensor:
    """`delta` without the rounding of O, which few numbers that sum over all queries would show.

    dS = P * (dP - delta), and P sums to 1 - p_sinks: so the sum of dS over the keys tells what P * dP sums to.
    """
    exact = ds_of_rows + delta * (1 - p_sinks)
    return exact if dlse is None else exact - dlse.masked_fill(lse == -math.inf, 0)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def rows_kernel(
    q: Heads,
    k: Heads,
    o: Heads,
    do: Heads,
    lse,
    dlse,
    lse_log2,
    rest_log2,
    delta,
    rules: Rules,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the other two kernels need of BLOCK_M query rows: delta, and lse in base 2, in fp32 as two floats."""
    visible, scoring = rules.visible, rules.scoring
    i_m, i_h, i_b = program_share(tl.cdiv(n_q, BLOCK_M), H)
    q_start = position_of_first_query(visible, i_b)
    queries = query_tokens(i_m, i_b, n_q, q_start, visible, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    p_row = (i_b * H + i_h) * n_q + o_q
    # [M, D]
    b_o = load_tile(head_of(o, i_b, i_h), o.s, i_m, m_q, D_V, BLOCK_M, BLOCK_V).to(tl.float32)
    b_do = load_tile(head_of(do, i_b, i_h), do.s, i_m, m_q, D_V, BLOCK_M, BLOCK_V).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    b_lse = tl.load(lse + p_row, mask=m_q, other=float("-inf"))
    if dlse is not None:  # which may be anything where the lse is a constant
        b_delta -= tl.load(dlse + p_row, mask=b_lse != float("-inf"), other=0.0)
    # An lse of +inf makes every weight exp2(score - lse) of a row that sees nothing 0, without a NaN.
    b_lse_log2 = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)
    m_row = o_q < n_q
    tl.store(delta + p_row, b_delta, mask=m_row)
    tl.store(lse_log2 + p_row, b_lse_log2, mask=m_row)

    if rest_log2 is not None:
        # Every weight of a row is off by the rounding of its lse. They sum to 1, so one more pass tells by how much.
        rounded = tl.max(tl.where(b_lse == float("-inf"), 0.0, tl.abs(b_lse_log2)), 0) > PRECISE_UP_TO_LOG2
        tile_range = key_range(i_m, i_b, q_start, n_q, n_k, visible, BLOCK_M, BLOCK_N)
        # [M, D]
        b_q = load_tile(head_of(q, i_b, i_h), q.s, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
        p_k = head_of(k, i_b, i_h // GROUP)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        if scoring.sinks is not None:
            b_sum = tl.where(rounded, tl.exp2(sink_log2(scoring, i_h) - b_lse_log2), 0.0)
        for i_n in tl.range(tile_range[0], tl.where(rounded, tile_range[3], tile_range[0])):
            keys = key_tokens(i_n, i_b, n_k, visible, BLOCK_N)
            m_k = keys[1]
            # [N, D]
            b_k = load_tile(p_k, k.s, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
            # [M, N]
            b_p = weights(b_q, b_k, b_lse_log2[:, None], None, scoring, PRECISION)[0]
            if is_edge(i_n, tile_range):
                b_p = tl.where(keep(as_column(queries), as_row(keys), visible), b_p, 0.0)
            b_sum += tl.sum(b_p, 1)
        tl.store(rest_log2 + p_row, tl.log2(tl.where(b_sum > 0.0, b_sum, 1.0)), mask=m_row)


@triton.jit
def weights(b_x, b_y, b_lse_log2, b_rest_log2, scoring, PRECISION: tl.constexpr):
    """(P of a tile before the mask, the derivative of its scores): [M, N] where x is Q and y is K, else [N, M]."""
    b_s_log2, b_slope = scores_log2(dot(b_x, tl.trans(b_y), None, PRECISION), scoring)
    b_p_log2 = b_s_log2 - b_lse_log2
    if b_rest_log2 is not None:
        b_p_log2 -= b_rest_log2
    return tl.exp2(b_p_log2), b_slope


@triton.jit
def tile_gradients(
    b_x, b_y, b_dx, b_dy, b_lse_log2, b_rest_log2, b_delta, edge, queries, keys, m_kept, rules, PRECISION: tl.constexpr
):
    """Of a tile: the weights of V before the factor of dropout, dS, and the derivative by scale * q k^T.

    [M, N] where x is Q, dx dO, y K and dy V, with queries in columns; [N, M] if the other way round.
    """
    visible, scoring, dropout = rules
    b_p, b_slope = weights(b_x, b_y, b_lse_log2, b_rest_log2, scoring, PRECISION)
    if edge:
        b_p = tl.where(keep(queries, keys, visible), b_p, 0.0)
    b_dp = dot(b_dx, tl.trans(b_dy), None, PRECISION)
    if dropout is not None:
        b_dp = tl.where(m_kept, b_dp * dropout.factor, 0.0)
    b_ds = b_p * (b_dp - b_delta)
    if dropout is not None:
        b_p = tl.where(m_kept, b_p, 0.0)
    return b_p, b_ds, b_ds * b_slope


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dk_dv_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    do: Heads,
    lse_log2,
    rest_log2,
    delta,
    dk: Heads,
    dv: Heads,
    rules: Rules,
    scale,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes BLOCK_N rows of a key head's dK and dV, over the query tiles of all heads that share it."""
    visible, dropout = rules.visible, rules.dropout
    i_n, i_h, i_b = program_share(tl.cdiv(n_k, BLOCK_N), H // GROUP)
    q_start = position_of_first_query(visible, i_b)
    tile_range = query_range(i_n, i_b, q_start, n_q, n_k, visible, BLOCK_M, BLOCK_N)

    keys = key_tokens(i_n, i_b, n_k, visible, BLOCK_N)
    o_k, m_k = keys[0], keys[1]
    # [N, D]
    b_k = load_tile(head_of(k, i_b, i_h), k.s, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
    b_v = load_tile(head_of(v, i_b, i_h), v.s, i_n, m_k, D_V, BLOCK_N, BLOCK_V)

    b_dk = tl.zeros([BLOCK_N, BLOCK_QK], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for i_member in tl.range(0, GROUP):
        i_hq = i_h * GROUP + i_member
        p_q = head_of(q, i_b, i_hq)
        p_do = head_of(do, i_b, i_hq)
        i_row = (i_b * H + i_hq) * n_q
        for i_m in tl.range(tile_range[0], tile_range[3]):
            edge = is_edge(i_m, tile_range)
            queries = query_tokens(i_m, i_b, n_q, q_start, visible, BLOCK_M)
            o_q, m_q = queries[0], queries[1]
            # [M, D]
            b_q = load_tile(p_q, q.s, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
            b_do = load_tile(p_do, do.s, i_m, m_q, D_V, BLOCK_M, BLOCK_V)
            # [M]
            b_lse_log2 = tl.load(lse_log2 + i_row + o_q, mask=m_q, other=float("inf"))
            b_rest_log2 = None
            if rest_log2 is not None:
                b_rest_log2 = tl.load(rest_log2 + i_row + o_q, mask=m_q, other=0.0)[None, :]
            b_delta = tl.load(delta + i_row + o_q, mask=m_q, other=0.0)
            # [N, M]
            m_kept = None
            if dropout is not None:
                m_kept = tl.trans(kept(o_q, i_n, i_b, i_hq, dropout, BLOCK_N))
            b_p, _, b_dqk = tile_gradients(
                b_k, b_q, b_v, b_do, b_lse_log2[None, :], b_rest_log2, b_delta[None, :],
                edge, as_row(queries), as_column(keys), m_kept, rules, PRECISION,
            )  # fmt: skip
            # [N, D]
            b_dv = dot(b_p.to(b_do.dtype), b_do, b_dv, PRECISION)
            b_dk = dot(b_dqk.to(b_q.dtype), b_q, b_dk, PRECISION)

    # A full tile is full for the real keys only: what was summed up for the others is thrown away.
    if dropout is not None:
        b_dv *= dropout.factor
    b_dk = tl.where(m_k[:, None], b_dk * scale, 0.0)
    b_dv = tl.where(m_k[:, None], b_dv, 0.0)
    m_row = o_k < n_k
    store_tile(head_of(dk, i_b, i_h), dk.s, i_n, m_row, b_dk, D_QK, BLOCK_N, BLOCK_QK)
    store_tile(head_of(dv, i_b, i_h), dv.s, i_n, m_row, b_dv, D_V, BLOCK_N, BLOCK_V)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dq_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    do: Heads,
    lse_log2,
    rest_log2,
    delta,
    dq: Heads,
    ds_of_rows,
    rules: Rules,
    scale,
    H,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes BLOCK_M rows of one head's dQ, over the key tiles they see."""
    visible, dropout = rules.visible, rules.dropout
    n_tiles = tl.cdiv(n_q, BLOCK_M)
    i_m, i_h, i_b = program_share(n_tiles, H)
    if visible.right is not None:
        i_m = n_tiles - 1 - i_m  # heaviest first, as in the forward
    q_start = position_of_first_query(visible, i_b)
    tile_range = key_range(i_m, i_b, q_start, n_q, n_k, visible, BLOCK_M, BLOCK_N)

    queries = query_tokens(i_m, i_b, n_q, q_start, visible, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    # [M, D]
    b_q = load_tile(head_of(q, i_b, i_h), q.s, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
    b_do = load_tile(head_of(do, i_b, i_h), do.s, i_m, m_q, D_V, BLOCK_M, BLOCK_V)
    # [M]
    p_row = (i_b * H + i_h) * n_q + o_q
    b_lse_log2 = tl.load(lse_log2 + p_row, mask=m_q, other=float("inf"))
    b_rest_log2 = None
    if rest_log2 is not None:
        b_rest_log2 = tl.load(rest_log2 + p_row, mask=m_q, other=0.0)[:, None]
    b_delta = tl.load(delta + p_row, mask=m_q, other=0.0)
    p_k = head_of(k, i_b, i_h // GROUP)
    p_v = head_of(v, i_b, i_h // GROUP)

    b_dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    b_ds_of_rows = tl.zeros([BLOCK_M], tl.float32)
    for i_n in tl.range(tile_range[0], tile_range[3]):
        edge = is_edge(i_n, tile_range)
        keys = key_tokens(i_n, i_b, n_k, visible, BLOCK_N)
        m_k = keys[1]
        # [N, D]
        b_k = load_tile(p_k, k.s, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
        b_v = load_tile(p_v, v.s, i_n, m_k, D_V, BLOCK_N, BLOCK_V)
        # [M, N]
        m_kept = None
        if dropout is not None:
            m_kept = kept(o_q, i_n, i_b, i_h, dropout, BLOCK_N)
        _, b_ds, b_dqk = tile_gradients(
            b_q, b_k, b_do, b_v, b_lse_log2[:, None], b_rest_log2, b_delta[:, None],
            edge, as_column(queries), as_row(keys), m_kept, rules, PRECISION,
        )  # fmt: skip
        # [M, D]
        b_dq = dot(b_dqk.to(b_k.dtype), b_k, b_dq, PRECISION)
        if ds_of_rows is not None:
            b_ds_of_rows += tl.sum(b_ds, 1)

    if ds_of_rows is not None:
        tl.store(ds_of_rows + p_row, tl.where(m_q, b_ds_of_rows, 0.0), mask=o_q < n_q)
    b_dq = tl.where(m_q[:, None], b_dq * scale, 0.0)
    store_tile(head_of(dq, i_b, i_h), dq.s, i_m, o_q < n_q, b_dq, D_QK, BLOCK_M, BLOCK_QK)
