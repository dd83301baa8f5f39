// Backward: one kernel for the gradients of queries and for those of keys and values, since each is the other's mirror.
//
//   rows are queries    S = Q K^T    dP = dO V^T    dQ += dS K
//   rows are keys       S = K Q^T    dP = V dO^T    dK += dS Q    dV += P dO
//
// Every sum is that of one warp, in a fixed order: the same inputs give the same bits.
#pragma once

#include <cstdint>

#include "gradient.cuh"
#include "instructions.cuh"
#include "online_softmax.cuh"
#include "params.h"
#include "product.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "tiling.h"
#include "visible_tiles.cuh"

namespace fastattn::cuda {

// Which gradients a kernel computes: dQ or dK, and dV. With a wide head the registers suffice for one of them only.
enum class Wanted { of_scores = 1, of_values = 2, both = 3 };

// Sums over a row's columns besides the products; over the columns of this lane only, until they are written.
template <bool kRowsAreQueries>
struct SumsOfRow {
  float ds, ds_by_distance, p_by_distance;

  FASTATTN_DEVICE void add(float weight, float pair_ds, const Params& p, Place<kRowsAreQueries> place, int row,
                           int column) {
    ds += pair_ds;
    if constexpr (kRowsAreQueries) {
      const int query = place.query(row, column), key = place.key(row, column);
      if (!p.alibi_slopes || query >= p.queries.n || key >= p.keys.n) return;
      const float distance = p.distance(place.b, query, key);
      ds_by_distance += pair_ds * distance;
      p_by_distance += weight * distance;
    }
  }

  FASTATTN_DEVICE void write(const BackwardParams& g, int b, int h, int token) const {
    const Side& side = kRowsAreQueries ? g.params.queries : g.params.keys;
    const auto write_to = [&](float* rows, float of_lane) {
      const float sum = sum_of_row(of_lane);
      if (!rows || lane() % 4 != 0 || token >= side.n) return;
      rows[(int64_t(b) * g.params.H + h) * side.n + token] = side.is_real(b, token) ? sum : 0;
    };
    if constexpr (kRowsAreQueries) {
      write_to(g.ds_of_queries, ds);
      write_to(g.ds_by_distance, ds_by_distance);
      write_to(g.p_by_distance, p_by_distance);
    } else {
      write_to(g.ds_of_keys, ds);
    }
  }
};

template <class Tiling>
constexpr int kBytesOfBackward = Tiling::shared_bytes(2, 2) + kRowStats * Tiling::kColumns * int(sizeof(float));

// Begins to copy the stats of the queries first, first + 1, ... .
template <int kSize>
FASTATTN_DEVICE void copy_stats(float (&shared)[kSize], const StatsOfQueries& all, int64_t head, int first) {
  constexpr int kQueries = kSize / kRowStats, kInChunk = 4;
  const int i = kInChunk * threadIdx.x;
  if (i < kSize) copy_16_bytes(shared + i, all.of_head(head, RowStat(i / kQueries)) + first + i % kQueries, true);
}

template <class Tiling, bool kRowsAreQueries, Wanted kWanted, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) backward_kernel(const __grid_constant__ BackwardParams g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  constexpr bool kOfScores = kWanted != Wanted::of_values, kOfValues = kWanted != Wanted::of_scores;
  static_assert(!kRowsAreQueries || kWanted == Wanted::of_scores);
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = g.params;
    const Side& own = kRowsAreQueries ? p.queries : p.keys;
    const Side& others = kRowsAreQueries ? p.keys : p.queries;
    const int own_heads = kRowsAreQueries ? p.H : p.H_kv;
    const int n_tiles = (own.n + Tiling::kRows - 1) / Tiling::kRows, i_tile = blockIdx.x % n_tiles;
    // The tiles with the most visible pairs come first.
    const int first_own = (kRowsAreQueries ? n_tiles - 1 - i_tile : i_tile) * Tiling::kRows;
    const int own_head = blockIdx.x / n_tiles % own_heads, b = blockIdx.x / n_tiles / own_heads;

    // x and dx are the rows' operands of S and dP, y and dy those of the columns.
    const Tile x{reinterpret_cast<Element*>(shared_memory())};
    const Tile dx{x.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile y{dx.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile dy{y.data + kColumns * Tiling::kHeadDim};
    // The stats of the columns, where those are queries.
    auto& stats = *reinterpret_cast<float (*)[kRowStats * kColumns]>(dy.data + kColumns * Tiling::kHeadDim);
    const Rows &x_rows = kRowsAreQueries ? p.q : p.k, &dx_rows = kRowsAreQueries ? g.d_o : p.v;
    const Rows &y_rows = kRowsAreQueries ? p.k : p.q, &dy_rows = kRowsAreQueries ? p.v : g.d_o;

    const int first_row = 16 * kRowBlocks * warp();
    Sums of_scores[kRowBlocks][Tiling::kHeadDim / 8] = {};
    Sums of_values[kRowBlocks][Tiling::kHeadDim / 8] = {};
    copy_rows<Tiling::kRows, kThreads>(x, x_rows, own_head, p.d_qk, own, b, first_own);
    copy_rows<Tiling::kRows, kThreads>(dx, dx_rows, own_head, p.d_v, own, b, first_own);
    commit_copies();

    for (int i_head = 0; i_head < (kRowsAreQueries ? 1 : p.group()); ++i_head) {
      const int h = kRowsAreQueries ? own_head : own_head * p.group() + i_head;
      const int other_head = kRowsAreQueries ? h / p.group() : h;
      const int64_t head = int64_t(b) * p.H + h;
      RowStats own_stats[2 * kRowBlocks];
      if constexpr (kRowsAreQueries) load_stats(own_stats, g.stats, head, first_own + first_row + lane() / 4);
      SumsOfRow<kRowsAreQueries> sums[2 * kRowBlocks] = {};
      VisibleTiles<kRowsAreQueries, kColumns> tiles(p, b, first_own, Tiling::kRows);
      VisibleTile tile, next;
      bool more = tiles.next(tile);
      const auto copy_dy = [&](const VisibleTile& of) {
        copy_rows<kColumns, kThreads>(dy, dy_rows, other_head, p.d_v, others, b, of.first);
        commit_copies();
      };
      if (more) copy_dy(tile);
      while (more) {
        wait_for_copies<0>();
        __syncthreads();  // dy has arrived, and y is no longer read
        copy_rows<kColumns, kThreads>(y, y_rows, other_head, p.d_qk, others, b, tile.first);
        if constexpr (!kRowsAreQueries) copy_stats(stats, g.stats, head, tile.first);
        commit_copies();
        more = tiles.next(next);
        Sums dp[kRowBlocks][kColumns / 8] = {};
        if constexpr (kOfScores) add_product(dp, dx, first_row, dy);

        wait_for_copies<0>();
        __syncthreads();  // y has arrived, and where the rows are queries dy is no longer read
        if (kRowsAreQueries && more) copy_dy(next);
        Sums s[kRowBlocks][kColumns / 8] = {};
        add_product(s, x, first_row, y);
        const Place<kRowsAreQueries> place{b, h, first_own + first_row, tile.first};
        const auto stats_of = [&](int row, int column) -> RowStats {
          if constexpr (kRowsAreQueries) return own_stats[row / 8];
          return {stats[column], stats[kColumns + column], stats[2 * kColumns + column]};
        };
        const auto visit = [&](int row, int column, float weight, float ds) {
          sums[row / 8].add(weight, ds, p, place, row, column);
        };
        weights_and_gradients<Element, kGeneral>(s, dp, p, place, tile.partial, stats_of, visit);
        if constexpr (kOfValues) add_weighted(of_values, s, dy);
        if constexpr (!kRowsAreQueries) {
          __syncthreads();  // dy is no longer read
          if (more) copy_dy(next);
        }
        if constexpr (kOfScores) add_weighted(of_scores, dp, y);
        tile = next;
      }
      if constexpr (kGeneral && kOfScores) {
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          sums[i].write(g, b, h, first_own + first_row + 8 * i + lane() / 4);
        }
      }
    }

    wait_for_copies<0>();
    const int own_token = first_own + first_row;
    if constexpr (kOfScores) {
      const int64_t head = int64_t(b) * p.H + own_head;
      const auto sees_nothing = [&](int query) {
        return query < p.queries.n && g.stats.of_head(head, RowStat::rest_log2)[query] == kInfinity;
      };
      store_rows<Element>(of_scores, kRowsAreQueries ? g.dq : g.dk, own_head, p.d_qk, own, b, own_token, [&](int i) {
        return kRowsAreQueries && sees_nothing(own_token + 8 * i + lane() / 4) ? 0 : p.scale;
      });
    }
    if constexpr (kOfValues) {
      store_rows<Element>(of_values, g.dv, own_head, p.d_v, own, b, own_token,
                          [&](int) { return kGeneral && p.dropout.drops ? p.dropout.on_kept : 1; });
    }
  }
}

}  // namespace fastattn::cuda
