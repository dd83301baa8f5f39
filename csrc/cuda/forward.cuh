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

// Computes the softmax and the weighted sums of a warp's rows, which are those of `q` from first_row on, tile by tile.
// copy_q() begins to copy the queries, copy_k(key) and copy_v(key) the tile that begins with that key, of which the
// warp takes what is at `k` and `v`: place_of(key) is the place of these scores. All warps of a block must call it.
template <bool kGeneral, int kColumnBlocks, class Element, int kHeadDim, int kRowBlocks, class Tiles, class CopyQ,
          class CopyK, class CopyV, class PlaceOf>
FASTATTN_DEVICE void attend(OnlineSoftmax<Element, kRowBlocks>& softmax, Sums (&o)[kRowBlocks][kHeadDim / 8],
                            const ForwardParams& f, Tiles& tiles, SharedTile<Element, kHeadDim> q, int first_row,
                            SharedTile<Element, kHeadDim> k, SharedTile<Element, kHeadDim> v, CopyQ copy_q,
                            CopyK copy_k, CopyV copy_v, PlaceOf place_of) {
  const Params& p = f.params;
  VisibleTile tile, next;
  bool more = tiles.next(tile);
  if (more) {
    copy_q();
    copy_k(tile.first);
    commit_copies();
  }
  while (more) {
    wait_for_copies<0>();
    __syncthreads();
    copy_v(tile.first);
    commit_copies();
    more = tiles.next(next);  // now, while there are registers for it

    Sums s[kRowBlocks][kColumnBlocks] = {};
    add_product(s, q, first_row, k);
    const auto place = place_of(tile.first);
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
    if (more) {
      copy_k(next.first);
      commit_copies();
    }
    add_weighted(o, s, v);
    tile = next;
  }
}

// Returns what the sums of values of a query are to be multiplied by, and writes its lse if this lane is to.
template <bool kGeneral>
FASTATTN_DEVICE float finish_row(const ForwardParams& f, int b, int h, int query, RowSum row, bool writes_lse) {
  const Params& p = f.params;
  if (kGeneral && p.sinks) row = row.beside(p.sinks[h], p.score_scale.on_score_log2);
  if (writes_lse) {
    f.lse[(int64_t(b) * p.H + h) * p.queries.n + query] =
        p.queries.is_real(b, query) && row.sum != 0 ? lse_of(row.max, p.score_scale.on_score_log2, log2f(row.sum))
                                                    : -kInfinity;
  }
  const float on_o = f.headroom.one_over_factor * (kGeneral && p.dropout.drops ? p.dropout.on_kept : 1);
  return one_over_sum(row.sum) * row.on_weights * on_o;
}

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
    VisibleTiles<true, kColumns> tiles(p, b, first_query, Tiling::kRows);

    const int first_row = 16 * kRowBlocks * warp();
    OnlineSoftmax<Element, kRowBlocks> softmax;
    Sums o[kRowBlocks][Tiling::kHeadDim / 8] = {};
    attend<kGeneral, kColumns / 8>(
        softmax, o, f, tiles, q, first_row, k, v,
        [&] { copy_rows<Tiling::kRows, kThreads>(q, p.q, h, p.d_qk, p.queries, b, first_query); },
        [&](int key) { copy_rows<kColumns, kThreads>(k, f.keys<kInPages>(), h / p.group(), p.d_qk, p.keys, b, key); },
        [&](int key) { copy_rows<kColumns, kThreads>(v, f.values<kInPages>(), h / p.group(), p.d_v, p.keys, b, key); },
        [&](int key) { return Place<true>{b, h, first_query + first_row, key}; });

    const int own_query = first_query + first_row;
    float on_row[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int query = own_query + 8 * i + lane() / 4;
      const RowSum row{softmax.max[i / 2][i % 2], softmax.whole_sum(i, f.headroom), 1};
      on_row[i] = finish_row<kGeneral>(f, b, h, query, row, lane() % 4 == 0 && query < p.queries.n);
    }
    store_rows<Element>(o, f.o, h, p.d_v, p.queries, b, own_query, [&](int i) { return on_row[i]; });
  }
}

}  // namespace fastattn::cuda
