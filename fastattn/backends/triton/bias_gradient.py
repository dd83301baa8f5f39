"""The gradient of a bias, in its own shape and in fp32: dS summed over whatever shares an entry of the bias."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import config_for
from .dropout import kept
from .launches import Launches
from .recompute import Rows, load_rows, tile_gradients
from .rules import Rules
from .tiles import Heads, Table, head_of, load_tile, program_share, table
from .visibility import (
    anything,
    as_column,
    as_row,
    key_range,
    key_tokens,
    position_of_first_query,
    query_tokens,
    shown,
)


def compute_gradient_of_table(
    launches: Launches, dbias: Tensor, inputs: tuple, sizes: tuple[int, int, int, int], shape: dict[str, object]
) -> None:
    """Writes the gradient of a bias with an entry for each pair of query and key.

    Args:
        dbias: in four dimensions.
        inputs: the first arguments of `dbias_kernel`.
        sizes: B, H, n_q, n_k.
        shape: its constants.
    """
    (B, H, n_q, n_k), (B_bias, H_bias) = sizes, dbias.shape[:2]
    block_d = max(shape["BLOCK_QK"], shape["BLOCK_V"])
    config = config_for("dbias", inputs[0].data, block_d, launches.rules.heavy_terms)
    programs = B_bias * H_bias * triton.cdiv(n_q, config.BLOCK_M) * triton.cdiv(n_k, config.BLOCK_N)
    arguments = (*inputs, table(dbias), launches.rules, B // B_bias, H // H_bias, H, n_q, n_k)
    launches.launch(dbias_kernel, programs, *arguments, **shape, **config._asdict())


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dbias_kernel(
    q: Heads,
    k: Heads,
    v: Heads,
    do: Heads,
    rows: Rows,
    dbias: Table,
    rules: Rules,
    B_SHARING,
    H_SHARING,
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
    """One program computes BLOCK_M by BLOCK_N entries of one dbias, over the samples and heads that share them."""
    visible, dropout = rules.visible, rules.dropout
    n_tiles_k = tl.cdiv(n_k, BLOCK_N)
    i_tile, i_h_bias, i_b_bias = program_share(tl.cdiv(n_q, BLOCK_M) * n_tiles_k, H // H_SHARING)
    i_m, i_n = i_tile // n_tiles_k, i_tile % n_tiles_k

    # [M, N]
    b_dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_sharing in tl.range(0, B_SHARING * H_SHARING):
        i_b, i_h = i_b_bias + i_sharing // H_SHARING, i_h_bias + i_sharing % H_SHARING
        q_offset = position_of_first_query(visible, i_b)
        tile_range = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
        if (i_n >= tile_range[0]) & (i_n < tile_range[3]):
            queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
            keys = key_tokens(i_n, i_b, n_k, visible, True, BLOCK_N)
            o_q, m_q, m_k = queries[0], queries[1], keys[1]
            m_dense = shown(queries, keys, i_b, i_h, visible, QUERIES_DOWN=True)
            if visible.dense.data is None or anything(m_dense):
                # [M, D]
                b_q = load_tile(head_of(q, i_b, i_h), q, i_m, m_q, D_QK, BLOCK_M, BLOCK_QK)
                b_do = load_tile(head_of(do, i_b, i_h), do, i_m, m_q, D_V, BLOCK_M, BLOCK_V)
                # [N, D]
                b_k = load_tile(head_of(k, i_b, i_h // GROUP), k, i_n, m_k, D_QK, BLOCK_N, BLOCK_QK)
                b_v = load_tile(head_of(v, i_b, i_h // GROUP), v, i_n, m_k, D_V, BLOCK_N, BLOCK_V)
                m_kept = None
                if dropout.seed is not None:
                    m_kept = kept(o_q, i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N)
                b_rows = load_rows(rows, (i_b * H + i_h) * n_q, o_q, m_q)
                pairs = as_column(queries), as_row(keys), i_b, i_h, n_q, n_k
                b_ds = tile_gradients(
                    b_q, b_k, b_do, b_v, as_column(b_rows), m_dense, m_kept, pairs, rules, True, PRECISION
                )[2]
                b_dbias += tl.where(m_q[:, None], b_ds, 0.0)

    o_q, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p_rows = dbias.data + i_b_bias * dbias.s_b + i_h_bias * dbias.s_h + o_q.to(tl.int64)[:, None] * dbias.s_q
    p_pairs = p_rows + o_k.to(tl.int64)[None, :] * dbias.s_k
    tl.store(p_pairs, b_dbias.to(dbias.data.dtype.element_ty), mask=(o_q < n_q)[:, None] & (o_k < n_k)[None, :])
