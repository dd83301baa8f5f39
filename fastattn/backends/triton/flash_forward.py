"""Forward: the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1), in base 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec, empty_output
from .configs import config_for, padded_head_dim
from .dropout import kept
from .launches import Launches, kind_of, repeated
from .rules import Rules, rules_of
from .scores import beside_sink, lse_log2, online_softmax, scores, sink_log2
from .tiles import (
    LOG2E,
    Heads,
    Pages,
    as_operand,
    dot,
    dot_precision,
    head_of,
    heads,
    load_from_pages,
    load_tile,
    numbers,
    page_and_row,
    pages,
    program_share,
    readable,
    scale_of_stored,
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
    query_tokens,
    shown,
    tile_of_step,
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    table: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    stored: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype and memory order of q, and lse [B, H, n_q] in fp32.

    Args:
        table: that of keys and values in pages; see `tiles.pages`.
        scales: fp32 [pages, H_kv, page_size, 1], of the rows of keys and of values in pages of int8.
        stored: what the bits in those pages are, as `stored_as` says.
    """
    given = q, k, v, table, *scales
    kind = kind_of((forward, stored), given, spec)
    if outputs := repeated(kind, given, spec):
        return tuple(outputs)
    (B, H, n_q, d_qk), (_, H_kv, _, d_v) = q.shape, v.shape
    o = empty_output(q, d_v)
    lse = q.new_empty(B, H, n_q, dtype=torch.float32)
    q, (k, v, in_pages, n_k) = readable(q), keys_of(k, v, table)
    block_qk, block_v = padded_head_dim(d_qk, q), padded_head_dim(d_v, q)
    rules = rules_of(spec, n_q, n_k, q.dtype)
    heavy_terms = rules.heavy_terms if stored is None else max(rules.heavy_terms, 1)
    config = config_for("forward", q, max(block_qk, block_v), heavy_terms)
    launches = Launches(rules, given, (q, k, v, in_pages.table, *scales), (o, lse))
    launches.launch(
        forward_kernel,
        B * H * triton.cdiv(n_q, config.BLOCK_M),
        heads(q),
        heads(k),
        heads(v),
        heads(scales[0]),
        heads(scales[1]),
        heads(o),
        lse,
        in_pages,
        rules,
        H,
        n_q,
        n_k,
        GROUP=H // max(H_kv, 1),
        D_QK=d_qk,
        D_V=d_v,
        BLOCK_QK=block_qk,
        BLOCK_V=block_v,
        PRECISION=dot_precision(q),
        STORED=stored,
        **config._asdict(),
    )
    launches.keep(kind, n_q, n_k, q.dtype)
    return o, lse


def keys_of(k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Pages, int]:
    """(k, v, their pages, n_k) as the kernels take them."""
    if table is None:
        return readable(k), readable(v), pages(None, k), k.shape[2]
    return k, v, pages(table, k), table.shape[1] * k.shape[2]


@triton.jit(do_not_specialize=["n_q", "n_k"])
def forward_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    k_scales: Heads,
    v_scales: Heads,
    o: Heads,
    lse,
    pages: Pages,
    rules: Rules,
    H,
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
    """One program computes BLOCK_M rows of a head's output: first over the full key tiles, then over the edge tiles."""
    visible = rules.visible
    n_tiles = tl.cdiv(n_q, BLOCK_M)
    i_m, i_h, i_b = program_share(n_tiles, H)
    if visible.right is not None:
        i_m = n_tiles - 1 - i_m  # the last tiles see most keys: start them first, so that none is left for the end
    q_offset = position_of_first_query(visible, i_b)
    tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)

    queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
    o_q, m_q = queries[0], queries[1]
    # [M, D]
    b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
    i_h_kv = i_h // GROUP
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
        i_h,
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
    b_o, b_lse = finished(b_o, b_max, b_sum, m_q, i_h, rules)
    m_row = o_q < n_q
    store_tile(head_of(o, i_b, i_h), o, i_m, m_row, b_o, D_V, BLOCK_M, BLOCK_V)
    tl.store(lse + (i_b * H + i_h) * n_q + o_q, b_lse, mask=m_row)


@triton.jit
def attended(
    b_q,
    k,
    v,
    k_scales,
    v_scales,
    pages,
    queries,
    tile_range,
    i_b,
    i_h,
    i_h_kv,
    n_q,
    n_k,
    rules,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,
):
    """(maximum, sum, output) of the online softmax of rows over a `key_range`: nothing is divided by the sum yet.

    The output has the factor `on_weights` of the scoring, which the sum has not.

    i_h: the head of the rows, or a column [M, 1] of theirs; i_h_kv: the head of the keys, one for all.
    """
    visible, scoring, dropout = rules
    BLOCK_M: tl.constexpr = b_q.shape[0]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for PARTIAL in tl.static_range(2):
        first, end = loop_bounds(tile_range, PARTIAL)
        for step in tl.range(first, end):
            i_n = tile_of_step(step, tile_range, PARTIAL)
            keys = key_tokens(i_n, i_b, n_k, visible, PARTIAL, BLOCK_N)
            m_k = keys[1]
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
            if visible.dense.data is None or anything(m_dense):
                # [N, D]
                if pages.table is None:
                    b_k = load_tile(head_of(k, i_b, i_h_kv), k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
                else:
                    places = page_and_row(pages, i_b, keys[0], m_k, n_k)
                    b_k = load_from_pages(k, i_h_kv, places, m_k, D_QK, BLOCK_QK)
                if k_scales.data is not None:
                    b_k = numbers(b_k, STORED).to(b_q.dtype)  # exact in 16 bits
                # [M, N]
                b_qk = dot(b_q, tl.trans(b_k), None, PRECISION)
                if k_scales.data is not None:
                    b_scale = load_from_pages(k_scales, i_h_kv, places, m_k, 1, 1) * scale_of_stored(STORED)
                    b_qk *= tl.trans(b_scale)
                pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
                b_s = hide(scores(b_qk, pairs, scoring)[0], float("-inf"), m_dense, pairs, visible, PARTIAL)
                b_max, b_sum, b_p, b_rescale = online_softmax(b_s, scoring, b_max, b_sum)
                if dropout.seed is not None:
                    b_p = tl.where(kept(queries[0], i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N), b_p, 0.0)
                if scoring.on_weights is not None:
                    b_p *= scoring.on_weights
                # [N, D]
                if pages.table is None:
                    b_v = load_tile(head_of(v, i_b, i_h_kv), v, i_n, m_k, D_V, BLOCK_N, BLOCK_V)
                else:
                    b_v = load_from_pages(v, i_h_kv, places, m_k, D_V, BLOCK_V)
                if v_scales.data is not None:
                    b_scale = load_from_pages(v_scales, i_h_kv, places, m_k, 1, 1) * scale_of_stored(STORED)
                    b_v = (numbers(b_v, STORED) * b_scale).to(b_q.dtype)
                # [M, D]
                b_o = dot(as_operand(b_p, b_v.dtype, rules), b_v, b_o * b_rescale[:, None], PRECISION)
    return b_max, b_sum, b_o


@triton.jit
def finished(b_o, b_max, b_sum, m_q, i_h, rules):
    """(output, lse) of rows, from what `attended` returned; `i_h` is their head, or a vector of theirs."""
    scoring, dropout = rules.scoring, rules.dropout
    # Equal to 0, not "not above 0": a NaN that was seen must come out.
    m_nothing_seen = (b_sum == 0.0) | ~m_q
    if scoring.sinks is not None:
        b_max, b_sum, b_rescale = beside_sink(sink_log2(scoring, i_h), b_max, b_sum)
        b_o *= b_rescale[:, None]
    if dropout.seed is not None:
        b_o *= dropout.factor
    b_sum = tl.where(m_nothing_seen, 1.0, b_sum)
    b_on_o = b_sum if scoring.on_weights is None else b_sum * scoring.on_weights
    b_o = tl.where(m_nothing_seen[:, None], 0.0, b_o / b_on_o[:, None])
    b_lse = tl.where(m_nothing_seen, float("-inf"), lse_log2(b_max, b_sum, scoring) / LOG2E)
    return b_o, b_lse
