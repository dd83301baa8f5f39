// Backward: one kernel for the gradients of queries and for those of keys and values, since each is the other's mirror.
//
//   rows are queries    S = Q K^T    dP = dO V^T    dQ += dS K
//   rows are keys       S = K Q^T    dP = V dO^T    dK += dS Q    dV += P dO
//
// Every sum is that of one warp, in a fixed order: the same inputs give the same bits.
#pragma once

#include "gradient.cuh"
#include "product.cuh"
#include "seen.cuh"
#include "tiling.h"

namespace fastattn::cuda {

// Which products a kernel adds to: dQ or dK, and dV. With a wide head the registers do for one of them only.
enum class Wanted { of_scores = 1, of_values = 2, both = 3 };

// What is summed over a row's columns beside the products: of those of this lane only, until it is written.
struct SumsOfRow {
  float ds, ds_by_distance, p_by_distance;

  FASTATTN_DEVICE void add(float weight, float pair_ds, float distance) {
    ds += pair_ds;
    ds_by_distance += pair_ds * distance;
    p_by_distance += weight * distance;
  }

  template <bool kRowsAreQueries>
  FASTATTN_DEVICE void write(const Backward& g, int b, int h, int token) const {
    const Side& side = kRowsAreQueries ? g.problem.queries : g.problem.keys;
    const auto write_to = [&](float* rows, float of_lane) {
      const float sum = sum_of_row(of_lane);
      if (!rows || lane() % 4 != 0 || token >= side.n) return;
      rows[(int64_t(b) * g.problem.H + h) * side.n + token] = side.is_real(b, token) ? sum : 0;
    };
    write_to(kRowsAreQueries ? g.ds_of_queries : g.ds_of_keys, ds);
    if (kRowsAreQueries) write_to(g.ds_by_distance, ds_by_distance);
    if (kRowsAreQueries) write_to(g.p_by_distance, p_by_distance);
  }
};

template <class Tiling>
constexpr int kBytesOfBackward =
    Tiling::shared_bytes(2, 2) + 3 * Tiling::kColumns * int(sizeof(float)) + bytes_of_seen(Tiling::kThreads);

template <class Tiling, bool kRowsAreQueries, Wanted kWanted, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) backward_kernel(const Backward g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  constexpr bool kOfScores = kWanted != Wanted::of_values, kOfValues = kWanted != Wanted::of_scores;
  static_assert(!kRowsAreQueries || kWanted == Wanted::of_scores);
  if constexpr (kHasTensorCores<Element>) {
    const Problem& p = g.problem;
    const Side& own = kRowsAreQueries ? p.queries : p.keys;
    const Side& others = kRowsAreQueries ? p.keys : p.queries;
    const int own_heads = kRowsAreQueries ? p.H : p.H_kv;
    const int n_tiles = (own.n + Tiling::kRows - 1) / Tiling::kRows, i_tile = blockIdx.x % n_tiles;
    // Those that may see, or be seen by, the most come first.
    const int first_own = (kRowsAreQueries ? n_tiles - 1 - i_tile : i_tile) * Tiling::kRows;
    const int own_head = blockIdx.x / n_tiles % own_heads, b = blockIdx.x / n_tiles / own_heads;

    // x and dx are the rows' operands of S and dP, y and dy those of the columns.
    const Tile x{reinterpret_cast<Element*>(shared_memory())};
    const Tile dx{x.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile y{dx.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile dy{y.data + kColumns * Tiling::kHeadDim};
    float* facts = reinterpret_cast<float*>(dy.data + kColumns * Tiling::kHeadDim);  // [3][kColumns], where columns are queries
    int* list = reinterpret_cast<int*>(facts + 3 * kColumns);
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
      const int64_t first_fact = (int64_t(b) * p.H + h) * padded_queries(p.queries.n);
      Facts own_facts[2 * kRowBlocks];
      if constexpr (kRowsAreQueries) {
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          const int64_t at = first_fact + first_own + first_row + 8 * i + lane() / 4;
          own_facts[i] = {g.facts.lse_log2[at], g.facts.rest_log2 ? g.facts.rest_log2[at] : 0, g.facts.delta[at]};
        }
      }
      SumsOfRow sums[2 * kRowBlocks] = {};
      SeenTiles<kRowsAreQueries, kColumns, kThreads> seen(p, b, first_own, Tiling::kRows, list);
      for (SeenTile tile; seen.next(tile);) {
        __syncthreads();  // nobody reads the last tile any more
        copy_rows<kColumns, kThreads>(y, y_rows, other_head, p.d_qk, others, b, tile.first);
        copy_rows<kColumns, kThreads>(dy, dy_rows, other_head, p.d_v, others, b, tile.first);
        if constexpr (!kRowsAreQueries) {
          const int i = threadIdx.x;
          if (i < 3 * kColumns / 4) {
            const float* from = i < kColumns / 4 ? g.facts.lse_log2 : i < kColumns / 2 ? g.facts.delta : g.facts.rest_log2;
            copy_16_bytes(facts + 4 * i, from + first_fact + tile.first + 4 * i % kColumns, from);
          }
        }
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();

        Sums s[kRowBlocks][kColumns / 8] = {}, dp[kRowBlocks][kColumns / 8] = {};
        add_product(s, x, first_row, y);
        if (kOfScores) add_product(dp, dx, first_row, dy);
        const Place<kRowsAreQueries> place{b, h, first_own + first_row, tile.first};
        const auto facts_of = [&](int row, int column) -> Facts {
          if constexpr (kRowsAreQueries) return own_facts[row / 8];
          return {facts[column], facts[2 * kColumns + column], facts[kColumns + column]};
        };
        const auto visit = [&](int row, int column, float weight, float ds) {
          const bool far = kRowsAreQueries && p.alibi_slopes;
          const float distance = far ? p.distance(b, place.query(row, column), place.key(row, column)) : 0;
          sums[row / 8].add(weight, ds, distance);
        };
        weights_and_gradients<Element, kGeneral>(s, dp, p, place, tile.edge, facts_of, visit);
        if constexpr (kOfValues) add_weighted(of_values, s, dy);
        if constexpr (kOfScores) add_weighted(of_scores, dp, y);
      }
      if constexpr (kGeneral && kOfScores) {
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          sums[i].template write<kRowsAreQueries>(g, b, h, first_own + first_row + 8 * i + lane() / 4);
        }
      }
    }

    wait_for_copies<0>();
    const int own_token = first_own + first_row;
    if constexpr (kOfScores) {
      store_rows<Element>(of_scores, kRowsAreQueries ? g.dq : g.dk, own_head, p.d_qk, own, b, own_token,
                          [&](int) { return p.scale; });
    }
    if constexpr (kOfValues) {
      store_rows<Element>(of_values, g.dv, own_head, p.d_v, own, b, own_token,
                          [&](int) { return kGeneral && p.dropout.drops ? p.dropout.on_kept : 1; });
    }
  }
}

}  // namespace fastattn::cuda
