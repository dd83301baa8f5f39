"""Forward for few queries: the keys are split among programs, each of which takes all heads that share them.

A few queries of a few heads would occupy a few multiprocessors, one for each tile of queries and head; and what they
wait for is the memory of keys and values, which is read once here for all heads of a group. Flash-Decoding (Dao,
Haziza, Massa and Sizov, 2023).

The parts are added in a fixed order, and where they begin depends on the heads, the queries and the visible keys of a
sample alone: what it gets has the same bits whatever else is in the batch, and however long the table of its pages is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec, empty_output
from .configs import FEW_QUERIES, config_for, padded_head_dim
from .flash_forward import attended, finished, keys_of
from .launches import Launches, kind_of, repeated
from .rules import Rules, rules_of
from .scores import measure, rescale
from .tiles import Heads, Pages, dot_precision, heads, program_share, readable, real_columns, rows_of_heads
from .visibility import key_range, position_of_first_query, queries_at, real_tokens

FEWEST_KEYS, MOST_KEYS = 128, 1024
"""Of the parts of a sample that sees few: with less, adding them takes longer than what more programs gain."""
MOST_PARTS = tl.constexpr(128)
"""Of a sample; where it sees more keys its parts are longer."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    table: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    stored: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As that of flash_forward, for at most FEW_QUERIES."""
    given = q, k, v, table, *scales
    kind = kind_of((forward, stored), given, spec)
    if outputs := repeated(kind, given, spec):
        return tuple(outputs[:2])
    (B, H, n_q, d_qk), (_, H_kv, _, d_v) = q.shape, v.shape
    o = empty_output(q, d_v)
    lse = q.new_empty(B, H, n_q, dtype=torch.float32)
    q, (k, v, in_pages, n_k) = readable(q), keys_of(k, v, table)
    group = H // max(H_kv, 1)
    rows = max(16, min(triton.next_power_of_2(group * n_q), 16 if q.dtype == torch.float32 else 32))
    block_qk, block_v = padded_head_dim(d_qk, q), padded_head_dim(d_v, q)
    rules = rules_of(spec, n_q, n_k, q.dtype)
    config = config_for("decoding", q, max(block_qk, block_v), rules.heavy_terms)
    programs = H_kv * triton.cdiv(group * n_q, rows)
    part = triton.cdiv(keys_of_part(programs), config.BLOCK_N)  # in tiles
    n_parts = max(1, min(triton.cdiv(n_k, part * config.BLOCK_N), MOST_PARTS.value))
    outputs, of_part, sums, lse_of_part = (o, lse), o, (None, None), lse
    if n_parts > 1:
        of_part = q.new_empty(n_parts * B, H, n_q, d_v, dtype=torch.float32)
        sums, lse_of_part = [lse.new_empty(n_parts, B, H, n_q) for _ in range(2)], None
        outputs = o, lse, of_part, *sums
    values = {"D_V": d_v, "BLOCK_V": block_v, "BLOCK_N": config.BLOCK_N, "block_m": FEW_QUERIES.value}
    launches = Launches(rules, given, (q, k, v, in_pages.table, *scales), outputs)
    launches.launch(
        decoding_kernel,
        B * programs * n_parts,
        heads(q),
        heads(k),
        heads(v),
        heads(scales[0]),
        heads(scales[1]),
        heads(of_part),
        lse_of_part,
        *sums,
        in_pages,
        rules,
        B,
        H_kv,
        n_parts,
        part,
        n_q,
        n_k,
        GROUP=group,
        D_QK=d_qk,
        BLOCK_QK=block_qk,
        PRECISION=dot_precision(q),
        STORED=stored,
        BLOCK_M=rows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **values,
    )
    if n_parts > 1:
        arguments = (heads(of_part), *sums, heads(o), lse, rules, B, H, part, n_q, n_k)
        launches.launch(combine_kernel, B * H * n_q, *arguments, **values, BLOCK=16)
    launches.keep(kind, n_q, n_k, q.dtype)
    return o, lse


def keys_of_part(programs: int) -> int:
    """How many keys a part has, a power of two: 8192 of a sample with so many programs for a part occupy 256."""
    return max(FEWEST_KEYS, min(triton.next_power_of_2(8192 // 256 * programs), MOST_KEYS))


@triton.jit(do_not_specialize=["B", "H_kv", "n_parts", "part", "n_q", "n_k"])
def decoding_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    k_scales: Heads,
    v_scales: Heads,
    o: Heads,
    lse,
    maxima,
    sums,
    pages: Pages,
    rules: Rules,
    B,
    H_kv,
    n_parts,
    part,
    n_q,
    n_k,
    GROUP: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,
):
    """One program computes BLOCK_M rows for a key head: row r is query r // GROUP of its head r % GROUP.

    Where there is a tensor for the lse, it takes all keys, and writes outputs. Else it takes a part of the keys, if
    there is one, and writes what `attended` returns of it: `o` as of batch entry i_part * B + i_b, the others as
    [parts, B, H, n_q].
    """
    visible = rules.visible
    i_program, i_h_kv, i_b = program_share(tl.cdiv(n_q * GROUP, BLOCK_M) * n_parts, H_kv)
    i_part, i_m = i_program % n_parts, i_program // n_parts
    q_offset = position_of_first_query(visible, i_b)
    tile_range = key_range(0, i_b, q_offset, n_q, n_k, visible, FEW_QUERIES, BLOCK_N)
    n_rows = n_q
    if lse is None:
        n_rows = tl.where(i_part < parts(tile_range, part), n_q, 0)  # of a part that there is not nothing is written
        tile_range = part_of_range(tile_range, i_part, part)

    o_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_q, o_h = o_row // GROUP, i_h_kv * GROUP + o_row % GROUP
    queries = queries_at(o_q, i_b, n_rows, q_offset, visible)
    m_q, m_row = queries[1], o_q < n_rows
    # [M, D]
    b_q = tl.load(rows_of_heads(q.data, q, i_b, o_h, o_q, BLOCK_QK), mask=real_columns(m_q, D_QK, BLOCK_QK), other=0.0)
    b_max, b_sum, b_o = attended(
        b_q,
        k,
        v,
        k_scales,
        v_scales,
        pages,
        queries,
        tile_range,
        i_b,
        o_h[:, None],
        i_h_kv,
        n_q,
        n_k,
        rules,
        D_QK,
        D_V,
        BLOCK_N,
        BLOCK_QK,
        BLOCK_V,
        PRECISION,
        STORED,
    )
    i_entry = i_part * B + i_b
    o_stat = (i_entry * H_kv * GROUP + o_h) * n_q + o_q
    if lse is not None:
        b_o, b_lse = finished(b_o, b_max, b_sum, m_q, o_h, rules)
        tl.store(lse + o_stat, b_lse, mask=m_row)
    else:
        tl.store(maxima + o_stat, b_max, mask=m_row)
        tl.store(sums + o_stat, b_sum, mask=m_row)
    p_o = rows_of_heads(o.data, o, i_entry, o_h, o_q, BLOCK_V)
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=real_columns(m_row, D_V, BLOCK_V))


@triton.jit
def parts(tile_range, part):
    """Into how many parts a `key_range` is split, of `part` tiles each where those are few."""
    begin, _, _, end = tile_range
    return tl.minimum(tl.cdiv(end - begin, part), MOST_PARTS)


@triton.jit
def part_of_range(tile_range, i_part, part):
    """One of the `parts` of a `key_range`, in the same form."""
    begin, full_begin, full_end, end = tile_range
    length = tl.maximum(part, tl.cdiv(end - begin, MOST_PARTS))
    first = tl.minimum(begin + i_part * length, end)
    last = tl.minimum(first + length, end)
    full_begin = tl.minimum(tl.maximum(full_begin, first), last)
    return first, full_begin, tl.minimum(tl.maximum(full_end, full_begin), last), last


@triton.jit(do_not_specialize=["B", "part", "n_q", "n_k"])
def combine_kernel(
    of_parts: Heads,
    maxima,
    sums,
    o: Heads,
    lse,
    rules: Rules,
    B,
    H,
    part,
    n_q,
    n_k,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds what `decoding_kernel` wrote of the parts of one row, `BLOCK` of them at a time.

    Of a single part nothing changes: its sums have the factor 1, and the others are zeros.
    """
    visible, scoring, _ = rules
    i_q, i_h, i_b = program_share(n_q, H)
    q_offset = position_of_first_query(visible, i_b)
    n_parts = parts(key_range(0, i_b, q_offset, n_q, n_k, visible, FEW_QUERIES, BLOCK_N), part)
    o_h, o_q = i_h + tl.zeros([1], tl.int64), i_q + tl.zeros([1], tl.int32)
    b_max, b_sum = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    b_o = tl.zeros([1, BLOCK_V], tl.float32)
    for first in tl.range(0, n_parts, BLOCK):
        o_part = first + tl.arange(0, BLOCK)
        m_part, o_entry = o_part < n_parts, o_part * B + i_b
        o_stat = (o_entry * H + i_h) * n_q + i_q
        # [1, parts]
        b_max_of_part = tl.load(maxima + o_stat, mask=m_part, other=float("-inf"))[None, :]
        b_sum_of_part = tl.load(sums + o_stat, mask=m_part, other=0.0)[None, :]
        b_new_max = tl.maximum(b_max, tl.max(b_max_of_part, 1))
        b_factor, b_base_log2 = measure(b_new_max, scoring)
        b_rescale = rescale(b_max, b_factor, b_base_log2, scoring)
        b_rescale_part = rescale(b_max_of_part, b_factor[:, None], b_base_log2[:, None], scoring)
        # [parts, D]
        p_part = rows_of_heads(of_parts.data, of_parts, o_entry, i_h, i_q, BLOCK_V)
        b_part = tl.load(p_part, mask=real_columns(m_part, D_V, BLOCK_V), other=0.0)
        b_o = b_o * b_rescale[:, None] + tl.sum(b_part * tl.trans(b_rescale_part), 0)[None, :]
        b_sum = b_sum * b_rescale + tl.sum(b_sum_of_part * b_rescale_part, 1)
        b_max = b_new_max
    m_q = real_tokens(o_q, n_q, visible.real_queries, i_b)
    b_o, b_lse = finished(b_o, b_max, b_sum, m_q, o_h, rules)
    p_o = rows_of_heads(o.data, o, i_b, o_h, o_q, BLOCK_V)
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=real_columns(o_q < n_q, D_V, BLOCK_V))
    tl.store(lse + (i_b * H + o_h) * n_q + o_q, b_lse)
