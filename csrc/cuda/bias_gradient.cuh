// The gradient of a bias that has an entry for each pair: dS, summed over the samples and heads that share it.
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

// Each block of threads takes a tile of entries, and adds what each sample and head that shares it gives, in order.
template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads) bias_gradient_kernel(const __grid_constant__ BackwardParams g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = g.params;
    const int query_tiles = (p.queries.n + Tiling::kRows - 1) / Tiling::kRows,
              key_tiles = (p.keys.n + kColumns - 1) / kColumns;
    const int first_key = blockIdx.x % key_tiles * kColumns;
    const int first_query = blockIdx.x / key_tiles % query_tiles * Tiling::kRows;
    const int bias_h = blockIdx.x / key_tiles / query_tiles % g.bias_H,
              bias_b = blockIdx.x / key_tiles / query_tiles / g.bias_H;

    const Tile q{reinterpret_cast<Element*>(shared_memory())};
    const Tile d_o{q.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile k{d_o.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile v{k.data + kColumns * Tiling::kHeadDim};
    const int first_row = 16 * kRowBlocks * warp();
    Sums sums[kRowBlocks][kColumns / 8] = {};
    for (int b = bias_b; b < p.B; b += g.bias_B) {
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
          const int query = first_query + first_row + row, key = first_key + column;
          if (query >= p.queries.n || key >= p.keys.n) return;
          const int64_t table = int64_t(bias_b) * g.bias_H + bias_h;
          g.d_bias[(table * p.queries.n + query) * p.keys.n + key] = ds;
        },
        sums);
  }
}

}  // namespace fastattn::cuda
