// The gradient of a bias that has an entry for each pair, or for each distance: dS, summed over what shares it.
#pragma once

#include <cstdint>

#include "gradient.cuh"
#include "instructions.cuh"
#include "params.h"
#include "product.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "tiling.h"

namespace fastattn::cuda {

// Each block of threads takes a tile of pairs, and adds what each sample and head gives that shares their entries, in
// order. By distance, these are shared by all tiles on a diagonal, wherever they stand in a tile.
template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads) bias_gradient_kernel(const __grid_constant__ BackwardParams g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = g.params;
    const Diagonals diagonals = Tiling::diagonals(p.queries.n, p.keys.n);
    const int n_tables = p.bias_by_distance ? diagonals.count() : diagonals.query_tiles * diagonals.key_tiles;
    const int i_table = blockIdx.x % n_tables;
    const int bias_h = blockIdx.x / n_tables % g.bias_H, bias_b = blockIdx.x / n_tables / g.bias_H;
    // Of the tiles of the queries first_tile, ..., end_tile - 1: those on that diagonal.
    int first_tile = i_table / diagonals.key_tiles, end_tile = first_tile + 1;
    int diagonal = i_table % diagonals.key_tiles - first_tile * diagonals.widths;
    if (p.bias_by_distance) {
      diagonal = i_table - diagonals.below();
      first_tile = diagonal < 0 ? (diagonals.widths - 1 - diagonal) / diagonals.widths : 0;
      end_tile = lesser(diagonals.query_tiles, tiles_of(diagonals.key_tiles - diagonal, diagonals.widths));
    }

    const Tile q{reinterpret_cast<Element*>(shared_memory())};
    const Tile d_o{q.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile k{d_o.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile v{k.data + kColumns * Tiling::kHeadDim};
    const int first_row = 16 * kRowBlocks * warp();
    Sums sums[kRowBlocks][kColumns / 8] = {};
    for (int i = first_tile * p.B + bias_b; i < end_tile * p.B; i += g.bias_B) {
      const int b = i % p.B, tile = i / p.B;
      const int first_query = tile * Tiling::kRows, first_key = (diagonal + tile * diagonals.widths) * kColumns;
      const Tokens queries = p.queries.tokens(b, first_query, Tiling::kRows),
                   keys = p.keys.tokens(b, first_key, kColumns);
      const TileKind kind = tile_kind(queries, keys, p.band);
      if (kind == TileKind::skipped) continue;
      for (int h = bias_h; h < p.H; h += g.bias_H) {
        __syncthreads();  // the previous tiles are no longer read
        copy_rows<Tiling::kRows, kThreads>(q, p.q, h, p.d_qk, p.queries, b, first_query);
        copy_rows<Tiling::kRows, kThreads>(d_o, g.d_o, h, p.d_v, p.queries, b, first_query);
        copy_rows<kColumns, kThreads>(k, p.k, h / p.group(), p.d_qk, p.keys, b, first_key);
        copy_rows<kColumns, kThreads>(v, p.v, h / p.group(), p.d_v, p.keys, b, first_key);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();

        Sums s[kRowBlocks][kColumns / 8] = {}, dp[kRowBlocks][kColumns / 8] = {};
        add_product(s, q, first_row, k);
        add_product(dp, d_o, first_row, v);
        const Place<true> place{b, h, first_query + first_row, first_key};
        RowStats stats[2 * kRowBlocks];
        load_stats(stats, g.stats, int64_t(b) * p.H + h, place.first_row + lane() / 4);
        weights_and_gradients<Element, true>(
            s, dp, p, place, kind == TileKind::partial || p.dense.data, [&](int row, int) { return stats[row / 8]; },
            [&](int row, int column, float, float ds) {
              sums[row / 16][column / 8][row / 8 % 2 * 2 + column % 2] += ds;
            });
      }
    }
    each(
        [&](float& ds, int row, int column) {
          const int64_t bias = int64_t(bias_b) * g.bias_H + bias_h;
          if (p.bias_by_distance) {
            g.d_bias[((bias * n_tables + i_table) * Tiling::kRows + first_row + row) * kColumns + column] = ds;
            return;
          }
          const int query = first_tile * Tiling::kRows + first_row + row,
                    key = (diagonal + first_tile * diagonals.widths) * kColumns + column;
          if (query >= p.queries.n || key >= p.keys.n) return;
          g.d_bias[(bias * p.queries.n + query) * p.keys.n + key] = ds;
        },
        sums);
  }
}

}  // namespace fastattn::cuda
