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
from ..diagonals import sums_of_diagonals
from ..gradients import RowStats, Sums, learned_gradients, wanted_sums
from .bias_gradient import compute_gradient_of_table, config_by_distance, empty_table
from .configs import Apart, config_for, padded_head_dim
from .dropout import kept
from .launches import Launches, kind_of, repeated
from .recompute import Rows, load_rows, tile_gradients
from .rules import Rules, rules_of
from .scores import beside_sink, distances, online_softmax, rest_log2, scores, sink_log2
from .tiles import (
    LOG2E,
    Heads,
    as_operand,
    dot,
    dot_precision,
    head_of,
    heads,
    load_tile,
    program_share,
    readable,
    store_tile,
)
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

PRECISE_UP_TO_LOG2: tl.constexpr = tl.constexpr(16.0)
"""The rounding of an lse up to this costs a weight at most some 6 units in the last place of fp32."""
PRECISE_IN_16_BITS: tl.constexpr = tl.constexpr(1024.0)
"""The same for weights that are rounded to 16 bits: 1 / 16 of a unit in the last place of fp16."""


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
    do = torch.zeros_like(o) if do is None else do
    given = q, k, v, o, do, lse, constant_where_nothing_is_seen(dlse, lse)
    kind = kind_of((backward, output_mask), given, spec)
    outputs = repeated(kind, given, spec) or _launched(kind, given, spec, output_mask)
    dq, dk, dv, dbias, ds_of_keys, ds_of_queries, *rows, ds_by_distance, p_by_distance = outputs
    if not any(output_mask[3:]):
        return dq, dk, dv, None, None, None
    if dbias is not None and spec.bias_by_distance:
        tiles = dbias[0].unflatten(1, (-1, config_by_distance(q, v).BLOCK_M))
        dbias = sums_of_diagonals(tiles, q.shape[2], k.shape[2])
    elif dbias is not None:
        dbias = dbias.view(spec.bias.shape)
    sums = Sums(dbias, ds_of_keys, ds_of_queries, ds_by_distance)
    stats = RowStats(*rows, given[6], spec.sinks, ds_of_queries)
    return dq, dk, dv, *learned_gradients(spec, output_mask, sums, stats, p_by_distance)


def _launched(
    kind: tuple, given: tuple[Tensor | None, ...], spec: Spec, output_mask: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """What the kernels write: dq, dk, dv, dbias in four dimensions, sums of dS, `Rows`, and sums by distance."""
    q, k, v, _, _, lse, dlse = given
    (B, H, n_q, d_qk), (_, H_kv, n_k, d_v) = q.shape, v.shape
    wanted = wanted_sums(spec, output_mask, rounded=True)
    dq, dk, dv = (torch.empty_like(x) if w else None for x, w in zip((q, k, v), output_mask, strict=False))
    lse = lse.contiguous()

    def per_query(is_wanted: bool) -> Tensor | None:
        return torch.empty_like(lse) if is_wanted else None

    rows = Rows(*(torch.empty_like(lse) for _ in Rows._fields))
    ds_of_keys = lse.new_empty(B, H, n_k) if wanted.of_keys else None
    ds_of_queries = per_query(wanted.of_queries)
    ds_by_distance, p_by_distance = per_query(wanted.by_distance), per_query(wanted.by_distance)
    dbias = empty_table(q, v, spec) if wanted.of_pairs else None
    results = dq, dk, dv, dbias, ds_of_keys, ds_of_queries, *rows, ds_by_distance, p_by_distance

    q, k, v, o, do = (readable(x) for x in given[:5])
    block_qk, block_v = padded_head_dim(d_qk, q), padded_head_dim(d_v, q)
    shape = {
        "GROUP": H // max(H_kv, 1),
        "D_QK": d_qk,
        "D_V": d_v,
        "BLOCK_QK": block_qk,
        "BLOCK_V": block_v,
        "PRECISION": dot_precision(q),
    }
    rules = rules_of(spec, n_q, n_k, v.dtype)
    launches = Launches(rules, given, (q, k, v, o, do, lse, dlse), results)
    compute_rows(launches, rows, heads(q), heads(k), heads(o), heads(do), lse, dlse)
    inputs, scalars = (heads(q), heads(k), heads(v), heads(do), rows), (rules, spec.scale, H, n_q, n_k)

    config = config_for("dk_dv", q, max(block_qk, block_v), rules.heavy_terms)
    if isinstance(config, Apart):
        passes = [(config.dk, (dk, None, ds_of_keys)), (config.dv, (None, dv, None))]
    else:
        passes = [(config, (dk, dv, ds_of_keys))]
    for config, outputs in passes:
        if any(output is not None for output in outputs):
            programs = B * H_kv * triton.cdiv(n_k, config.BLOCK_N)
            outputs = (*map(heads, outputs[:2]), outputs[2])
            launches.launch(dk_dv_kernel, programs, *inputs, *outputs, *scalars, **shape, **config._asdict())

    if dq is not None or wanted.of_queries:
        config = config_for("dq", q, max(block_qk, block_v), rules.heavy_terms)
        programs = B * H * triton.cdiv(n_q, config.BLOCK_M)
        outputs = (heads(dq), ds_of_queries, ds_by_distance, p_by_distance)
        launches.launch(dq_kernel, programs, *inputs, *outputs, *scalars, **shape, **config._asdict())
    if dbias is not None:
        tiles = config_by_distance(q, v) if spec.bias_by_distance else None
        compute_gradient_of_table(launches, dbias, inputs, (B, H, n_q, n_k), shape, tiles)
    launches.keep(kind, n_q, n_k, v.dtype)
    return results


def constant_where_nothing_is_seen(dlse: Tensor | None, lse: Tensor) -> Tensor | None:
    """`dlse`, but 0 where the lse is -inf, whatever arrives there."""
    return None if dlse is None else dlse.masked_fill(lse == -math.inf, 0)


def compute_rows(
    launches: Launches, rows: Rows, q: Heads, k: Heads, o: Heads, do: Heads, lse: Tensor, dlse: Tensor | None
) -> None:
    """Writes `rows`: [B, H, n_q] each, whose heads may lie apart, but all as far as those of delta.

    Args:
        lse: fp32 [B, H, n_q], contiguous.
        dlse: the same, as `constant_where_nothing_is_seen` returns it; or None.
    """
    (B, H, n_q, d_qk), (_, H_kv, n_k, _), d_v = q.data.shape, k.data.shape, o.data.shape[3]
    block_qk, block_v = padded_head_dim(d_qk, q.data), padded_head_dim(d_v, q.data)
    config = config_for("rows", q.data, max(block_qk, block_v), launches.rules.heavy_terms)
    launches.launch(
        rows_kernel,
        B * H * triton.cdiv(n_q, config.BLOCK_M),
        q,
        k,
        o,
        do,
        lse,
        dlse,
        rows,
        launches.rules,
        rows.delta.stride(1),
        H,
        n_q,
        n_k,
        GROUP=H // max(H_kv, 1),
        D_QK=d_qk,
        D_V=d_v,
        BLOCK_QK=block_qk,
        BLOCK_V=block_v,
        PRECISION=dot_precision(q.data),
        **config._asdict(),
    )


@triton.jit(do_not_specialize=["s_head", "n_q", "n_k"])
def rows_kernel(
    q: Heads,
    k: Heads,
    o: Heads,
    do: Heads,
    lse,
    dlse,
    rows: Rows,
    rules: Rules,
    s_head,
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
    """The statistics of BLOCK_M query rows that the other two kernels need: see `Rows`."""
    visible, scoring = rules.visible, rules.scoring
    i_m, i_h, i_b = program_share(tl.cdiv(n_q, BLOCK_M), H)
    q_offset = position_of_first_query(visible, i_b)
    queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    p_row = (i_b * H + i_h) * n_q + o_q
    # [M, D]
    b_o = load_tile(head_of(o, i_b, i_h), o, i_m, m_q, D_V, BLOCK_M, BLOCK_V).to(tl.float32)
    b_do = load_tile(head_of(do, i_b, i_h), do, i_m, m_q, D_V, BLOCK_M, BLOCK_V).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    if dlse is not None:
        b_delta -= tl.load(dlse + p_row, mask=m_q, other=0.0)
    b_lse = tl.load(lse + p_row, mask=m_q, other=float("-inf"))
    b_rest_log2 = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)
    m_row = o_q < n_q
    i_row = (i_b * H + i_h) * s_head + o_q
    tl.store(rows.delta + i_row, b_delta, mask=m_row)
    # The rounding of a large lse is a factor of every weight of its row, so the online softmax runs once more.
    # [M, D]
    b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
    precise_up_to = PRECISE_UP_TO_LOG2 if b_q.dtype == tl.float32 else PRECISE_IN_16_BITS
    m_rounded = (tl.abs(b_rest_log2) > precise_up_to) & (b_lse != float("-inf"))
    tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
    p_k = head_of(k, i_b, i_h // GROUP)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    for PARTIAL in tl.static_range(2):
        first, end = loop_bounds(tile_range, PARTIAL)
        for step in tl.range(first, tl.where(anything(m_rounded), end, first)):
            i_n = tile_of_step(step, tile_range, PARTIAL)
            keys = key_tokens(i_n, i_b, n_k, visible, PARTIAL, BLOCK_N)
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
            if visible.dense.data is None or anything(m_dense):
                # [N, D]
                b_k = load_tile(p_k, k, i_n, keys[1], D_QK, BLOCK_N, BLOCK_QK)
                # [M, N]
                pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
                b_s = scores(dot(b_q, tl.trans(b_k), None, PRECISION), pairs, scoring)[0]
                b_s = hide(b_s, float("-inf"), m_dense, pairs, visible, PARTIAL)
                b_max, b_sum, _, _ = online_softmax(b_s, scoring, b_max, b_sum)
    if scoring.sinks is not None:
        b_max, b_sum, _ = beside_sink(sink_log2(scoring, i_h), b_max, b_sum)
    m_rounded &= b_sum > 0.0
    tl.store(rows.reference + i_row, tl.where(m_rounded, b_max, 0.0), mask=m_row)
    b_sum = tl.where(m_rounded, b_sum, 1.0)
    tl.store(rows.rest_log2 + i_row, tl.where(m_rounded, rest_log2(b_max, b_sum, scoring), b_rest_log2), mask=m_row)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dk_dv_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    do: Heads,
    rows: Rows,
    dk: Heads,
    dv: Heads,
    ds_of_keys,
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
    """One program computes BLOCK_N rows of a key head's dK and dV, over the query tiles of all heads that share it.

    Where there is no tensor for one of them, the other alone.
    """
    visible, dropout = rules.visible, rules.dropout
    i_n, i_h, i_b = program_share(tl.cdiv(n_k, BLOCK_N), H // GROUP)
    q_offset = position_of_first_query(visible, i_b)
    tile_range = query_range(i_n, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)

    keys = key_tokens(i_n, i_b, n_k, visible, True, BLOCK_N)
    o_k, m_k = keys[0], keys[1]
    # [N, D]
    b_k = load_tile(head_of(k, i_b, i_h), k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
    b_v = load_tile(head_of(v, i_b, i_h), v, i_n, m_k, D_V, BLOCK_N, BLOCK_V)

    b_dk = tl.zeros([BLOCK_N, BLOCK_QK], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for i_member in tl.range(0, GROUP):
        i_hq = i_h * GROUP + i_member
        p_q = head_of(q, i_b, i_hq)
        p_do = head_of(do, i_b, i_hq)
        i_row = (i_b * H + i_hq) * n_q
        b_ds_of_keys = tl.zeros([BLOCK_N], tl.float32)
        for PARTIAL in tl.static_range(2):
            first, end = loop_bounds(tile_range, PARTIAL)
            # More stages of Hopper's few partial tiles would spill with Triton 3.6, and where padding masks loads of a
            # third one, ptxas has each wgmma wait for the last (C7515).
            for step in tl.range(first, end, num_stages=1 if PARTIAL and BLOCK_M >= 64 else None):
                i_m = tile_of_step(step, tile_range, PARTIAL)
                queries = query_tokens(i_m, i_b, n_q, q_offset, visible, PARTIAL, BLOCK_M)
                o_q, m_q = queries[0], queries[1]
                m_dense = shown(queries, keys, i_b, i_hq, visible, QUERIES_DOWN=False)
                if visible.dense.data is None or anything(m_dense):
                    # [M, D]
                    b_q = load_tile(p_q, q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
                    b_do = load_tile(p_do, do, i_m, m_q, D_V, BLOCK_M, BLOCK_V)
                    b_rows = load_rows(rows, i_row, o_q, m_q)
                    # [N, M]
                    m_kept = None
                    if dropout.seed is not None:
                        m_kept = tl.trans(kept(o_q, i_n, i_b, i_hq, n_q, n_k, dropout, BLOCK_N))
                    pairs = as_row(queries), as_column(keys), i_b, i_hq, n_q, n_k
                    _, b_left, b_ds, b_dqk = tile_gradients(
                        b_k, b_q, b_v, b_do, as_row(b_rows), m_dense, m_kept, pairs, rules, PARTIAL, PRECISION
                    )
                    if ds_of_keys is not None:
                        b_ds_of_keys += tl.sum(b_ds, 1)
                    # [N, D]
                    if dv.data is not None:
                        b_dv = dot(as_operand(b_left, b_do.dtype, rules), b_do, b_dv, PRECISION)
                    if dk.data is not None:
                        b_dk = dot(as_operand(b_dqk, b_q.dtype, rules), b_q, b_dk, PRECISION)

            # A full tile is full for the real keys only: what was summed up for the others is thrown away.
        if ds_of_keys is not None:
            tl.store(ds_of_keys + (i_b * H + i_hq) * n_k + o_k, tl.where(m_k, b_ds_of_keys, 0.0), mask=o_k < n_k)

    m_row = o_k < n_k
    if dk.data is not None:
        b_dk = tl.where(m_k[:, None], b_dk * scale, 0.0)
        store_tile(head_of(dk, i_b, i_h), dk, i_n, m_row, b_dk, D_QK, BLOCK_N, BLOCK_QK)
    if dv.data is not None:
        if dropout.seed is not None:
            b_dv *= dropout.factor
        b_dv = tl.where(m_k[:, None], b_dv, 0.0)
        store_tile(head_of(dv, i_b, i_h), dv, i_n, m_row, b_dv, D_V, BLOCK_N, BLOCK_V)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dq_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    do: Heads,
    rows: Rows,
    dq: Heads,
    ds_of_rows,
    ds_by_distance,
    p_by_distance,
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
    q_offset = position_of_first_query(visible, i_b)
    tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)

    queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    # [M, D]
    b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
    b_do = load_tile(head_of(do, i_b, i_h), do, i_m, m_q, D_V, BLOCK_M, BLOCK_V)
    i_row = (i_b * H + i_h) * n_q
    b_rows = load_rows(rows, i_row, o_q, m_q)
    p_k = head_of(k, i_b, i_h // GROUP)
    p_v = head_of(v, i_b, i_h // GROUP)

    b_dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    b_ds_of_rows = tl.zeros([BLOCK_M], tl.float32)
    b_ds_by_distance = tl.zeros([BLOCK_M], tl.float32)
    b_p_by_distance = tl.zeros([BLOCK_M], tl.float32)
    for PARTIAL in tl.static_range(2):
        first, end = loop_bounds(tile_range, PARTIAL)
        for step in tl.range(first, end):
            i_n = tile_of_step(step, tile_range, PARTIAL)
            keys = key_tokens(i_n, i_b, n_k, visible, PARTIAL, BLOCK_N)
            m_k = keys[1]
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
            if visible.dense.data is None or anything(m_dense):
                # [N, D]
                b_k = load_tile(p_k, k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
                b_v = load_tile(p_v, v, i_n, m_k, D_V, BLOCK_N, BLOCK_V)
                # [M, N]
                m_kept = None
                if dropout.seed is not None:
                    m_kept = kept(o_q, i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N)
                pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
                b_p, _, b_ds, b_dqk = tile_gradients(
                    b_q, b_k, b_do, b_v, as_column(b_rows), m_dense, m_kept, pairs, rules, PARTIAL, PRECISION
                )
                # [M, D]
                if dq.data is not None:
                    b_dq = dot(as_operand(b_dqk, b_k.dtype, rules), b_k, b_dq, PRECISION)
                if ds_of_rows is not None:
                    b_ds_of_rows += tl.sum(b_ds, 1)
                if ds_by_distance is not None:
                    b_distance = distances(pairs)
                    b_ds_by_distance += tl.sum(b_ds * b_distance, 1)
                    b_p_by_distance += tl.sum(b_p * b_distance, 1)

    if ds_of_rows is not None:
        tl.store(ds_of_rows + i_row + o_q, tl.where(m_q, b_ds_of_rows, 0.0), mask=o_q < n_q)
    if ds_by_distance is not None:
        tl.store(ds_by_distance + i_row + o_q, tl.where(m_q, b_ds_by_distance, 0.0), mask=o_q < n_q)
        tl.store(p_by_distance + i_row + o_q, tl.where(m_q, b_p_by_distance, 0.0), mask=o_q < n_q)
    if dq.data is not None:
        m_seen = m_q & (b_rows[1] != float("inf"))  # else 0 times a NaN that other queries see
        b_dq = tl.where(m_seen[:, None], b_dq * scale, 0.0)
        store_tile(head_of(dq, i_b, i_h), dq, i_m, o_q < n_q, b_dq, D_QK, BLOCK_M, BLOCK_QK)
