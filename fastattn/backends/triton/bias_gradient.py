"""The gradient of a bias, in its own shape and in fp32: dS summed over whatever shares an entry of the bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Spec
from ..diagonals import n_diagonals
from .configs import Config, config_for, padded_head_dim
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


def empty_table(q: Tensor, v: Tensor, spec: Spec) -> Tensor:
    """What `compute_gradient_of_table` writes: [B or 1, H or 1, n_q, n_k] in the dtype of the bias; or, for one by
    distance, fp32 [1, H or 1, BLOCK_M for each diagonal of tiles, BLOCK_N]."""
    if not spec.bias_by_distance:
        return torch.empty_like(spec.bias)[(None,) * (4 - spec.bias.dim())]
    config = config_by_distance(q, v)
    rows = n_diagonals(q.shape[2], v.shape[2], config.BLOCK_M, config.BLOCK_N) * config.BLOCK_M
    return q.new_empty(1, len(spec.bias), rows, config.BLOCK_N, dtype=torch.float32)


def config_by_distance(q: Tensor, v: Tensor) -> Config:
    """Tiles of BLOCK_M queries, a multiple of BLOCK_N, whatever else makes a score: `empty_table` cannot ask."""
    config = config_for("dbias", q, max(padded_head_dim(q.shape[3], q), padded_head_dim(v.shape[3], q)), 2)
    return config._replace(BLOCK_N=min(config.BLOCK_M, config.BLOCK_N))


def compute_gradient_of_table(
    launches: Launches,
    dbias: Tensor,
    inputs: tuple,
    sizes: tuple[int, int, int, int],
    shape: dict[str, object],
    by_distance: Config | None,
) -> None:
    """Writes the gradient of a bias with an entry for each pair of query and key, or for each distance.

    Args:
        dbias: that of `empty_table`.
        inputs: the first arguments of `dbias_kernel`.
        sizes: B, H, n_q, n_k.
        shape: its constants.
        by_distance: that of `config_by_distance`, or None.
    """
    (B, H, n_q, n_k), (B_bias, H_bias) = sizes, dbias.shape[:2]
    config = by_distance
    if config is None:
        config = config_for(
            "dbias", inputs[0].data, max(shape["BLOCK_QK"], shape["BLOCK_V"]), launches.rules.heavy_terms
        )
        tiles = triton.cdiv(n_q, config.BLOCK_M) * triton.cdiv(n_k, config.BLOCK_N)
    else:
        tiles = n_diagonals(n_q, n_k, config.BLOCK_M, config.BLOCK_N)
    shape = {**shape, "DIAGONALS": by_distance is not None, **config._asdict()}
    arguments = (*inputs, table(dbias), launches.rules, B // B_bias, H // H_bias, H, n_q, n_k)
    launches.launch(dbias_kernel, B_bias * H_bias * tiles, *arguments, **shape)


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
    DIAGONALS: tl.constexpr,
):
    """One program computes BLOCK_M by BLOCK_N entries of one dbias, over the samples and heads that share them.

    DIAGONALS: and over all tiles on a diagonal, whose entries have the same distance wherever they stand in a tile.
    """
    visible, dropout = rules.visible, rules.dropout
    n_tiles_q, n_tiles_k = tl.cdiv(n_q, BLOCK_M), tl.cdiv(n_k, BLOCK_N)
    WIDTHS: tl.constexpr = BLOCK_M // BLOCK_N  # by which a tile of the next queries stands further to the right
    if DIAGONALS:
        before = (n_tiles_q - 1) * WIDTHS  # diagonals below that of the first tile
        i_tile, i_h_bias, i_b_bias = program_share(before + n_tiles_k, H // H_SHARING)
        i_diagonal = i_tile - before
        first_m = tl.maximum(WIDTHS - 1 - i_diagonal, 0) // WIDTHS
        n_tiles = tl.minimum(n_tiles_q, tl.cdiv(n_tiles_k - i_diagonal, WIDTHS)) - first_m
    else:
        i_tile, i_h_bias, i_b_bias = program_share(n_tiles_q * n_tiles_k, H // H_SHARING)
        first_m = i_tile // n_tiles_k
        n_tiles: tl.constexpr = 1
        i_diagonal = i_tile % n_tiles_k - first_m * WIDTHS

    # [M, N]
    b_dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, B_SHARING * H_SHARING * n_tiles):
        i_sharing, i_m = i // n_tiles, first_m + i % n_tiles
        i_n = i_diagonal + i_m * WIDTHS
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

    if DIAGONALS:
        o_q, o_k, end_q, end_k = i_tile * BLOCK_M, 0, (before + n_tiles_k) * BLOCK_M, BLOCK_N
    else:
        o_q, o_k, end_q, end_k = first_m * BLOCK_M, (i_tile % n_tiles_k) * BLOCK_N, n_q, n_k
    o_q, o_k = o_q + tl.arange(0, BLOCK_M), o_k + tl.arange(0, BLOCK_N)
    p_rows = dbias.data + i_b_bias * dbias.s_b + i_h_bias * dbias.s_h + o_q.to(tl.int64)[:, None] * dbias.s_q
    p_pairs = p_rows + o_k.to(tl.int64)[None, :] * dbias.s_k
    tl.store(p_pairs, b_dbias.to(dbias.data.dtype.element_ty), mask=(o_q < end_q)[:, None] & (o_k < end_k)[None, :])
