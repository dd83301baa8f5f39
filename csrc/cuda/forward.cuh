// Forward: each block of threads computes some rows of a head's output, key tile by key tile. The keys of the next tile
// are copied while the values of this one are multiplied, and its values while its keys are. Those in pages are read
// where they lie.
#pragma once

#include <cmath>
#include <cstdint>

#include "../softmax.h"
#include "instructions.cuh"
#include "online_softmax.cuh"
#include "params.h"
#include "product.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "tiling.h"
#include "visible_tiles.cuh"

namespace fastattn::cuda {

template <class Tiling, bool kInPages, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) forward_kernel(const __grid_constant__ ForwardParams f) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = f.params;
    const int n_tiles = (int(p.queries.n) + Tiling::kRows - 1) / Tiling::kRows;
    // The last tiles come first: they may see the most keys.
    const int first_query = (n_tiles - 1 - blockIdx.x % n_tiles) * Tiling::kRows;
    const int h = blockIdx.x / n_tiles % p.H, b = blockIdx.x / n_tiles / p.H;

    char* memory = shared_memory();
    const Tile q{reinterpret_cast<Element*>(memory)};
    const Tile k{q.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile v{k.data + kColumns * Tiling::kHeadDim};
    const int h_kv = h / p.group();
    const auto copy_k = [&](int first) {
      copy_rows<kColumns, kThreads>(k, f.keys<kInPages>(), h_kv, p.d_qk, p.keys, b, first);
      commit_copies();
    };
    const auto copy_v = [&](int first) {
      copy_rows<kColumns, kThreads>(v, f.values<kInPages>(), h_kv, p.d_v, p.keys, b, first);
      commit_copies();
    };
    VisibleTiles<true, kColumns> tiles(p, b, first_query, Tiling::kRows);

    const int first_row = 16 * kRowBlocks * warp();
    OnlineSoftmax<Element, kRowBlocks> softmax;
    Sums o[kRowBlocks][Tiling::kHeadDim / 8] = {};
    VisibleTile tile, next;
    bool more = tiles.next(tile);
    if (more) {
      copy_rows<Tiling::kRows, kThreads>(q, p.q, h, p.d_qk, p.queries, b, first_query);
      copy_k(tile.first);
    }
    while (more) {
      wait_for_copies<0>();
      __syncthreads();
      copy_v(tile.first);
      more = tiles.next(next);  // now, while there are registers for it

      Sums s[kRowBlocks][kColumns / 8] = {};
      add_product(s, q, first_row, k);
      const Place<true> place{b, h, first_query + first_row, tile.first};
      finish_scores<kGeneral>(s, p, place);
      if (tile.partial) hide<kGeneral>(s, p, place);
      softmax.add(s, p.score_scale.on_score_log2, f.headroom, o);
      if constexpr (kGeneral) {
        if (p.dropout.drops) {
          each(
              [&](float& x, int row, int column) {
                if (!survives_dropout(p, place, row, column)) x = 0;
              },
              s);
        }
      }

      wait_for_copies<0>();
      __syncthreads();
      if (more) copy_k(next.first);
      add_weighted(o, s, v);
      tile = next;
    }

    const int own_query = first_query + first_row;
    const float on_o = f.headroom.one_over_factor * (kGeneral && p.dropout.drops ? p.dropout.on_kept : 1);
    float on_row[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      RowSum row{softmax.max[i / 2][i % 2], softmax.whole_sum(i, f.headroom), 1};
      if (kGeneral && p.sinks) row = row.beside(p.sinks[h], p.score_scale.on_score_log2);
      on_row[i] = one_over_sum(row.sum) * row.on_weights * on_o;
      const int query = own_query + 8 * i + lane() / 4;
      if (lane() % 4 != 0 || query >= p.queries.n) continue;
      f.lse[(int64_t(b) * p.H + h) * p.queries.n + query] =
          p.queries.is_real(b, query) && row.sum != 0 ? lse_of(row.max, p.score_scale.on_score_log2, log2f(row.sum))
                                                      : -kInfinity;
    }
    store_rows<Element>(o, f.o, h, p.d_v, p.queries, b, own_query, [&](int i) { return on_row[i]; });
  }
}

}  // namespace fastattn::cuda
