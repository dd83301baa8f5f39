// From products q.k to scores, and which pairs are visible.
#pragma once

#include <cmath>
#include <cstdint>

#include "../dtype.h"
#include "../mask.h"
#include "../philox.h"
#include "../softmax.h"
#include "elements.h"
#include "instructions.cuh"
#include "params.h"
#include "tile.cuh"

namespace fastattn::cuda {

// The place of a warp's sums in a head: that of their row 0 and column 0. The rows are queries and the columns keys, or
// the other way round.
template <bool kRowsAreQueries_>
struct Place {
  static constexpr bool kRowsAreQueries = kRowsAreQueries_;
  int b, h, first_row, first_column;

  FASTATTN_DEVICE int head(int) const { return h; }
  FASTATTN_DEVICE int query(int row, int column) const {
    return kRowsAreQueries ? first_row + row : first_column + column;
  }
  FASTATTN_DEVICE int key(int row, int column) const {
    return kRowsAreQueries ? first_column + column : first_row + row;
  }
};

// The same in all heads of a group together, of which row r is query r / group of head r % group.
struct PlaceInGroup {
  static constexpr bool kRowsAreQueries = true;
  int b, first_head, group, first_row, first_column;

  FASTATTN_DEVICE int head(int row) const { return first_head + (first_row + row) % group; }
  FASTATTN_DEVICE int query(int row, int) const { return (first_row + row) / group; }
  FASTATTN_DEVICE int key(int, int column) const { return first_column + column; }
};

FASTATTN_DEVICE float entry(const Table& table, DType dtype, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(table.data)[index];
  return dtype == DType::bf16 ? to_float(static_cast<const bf16*>(table.data)[index])
                              : to_float(static_cast<const f16*>(table.data)[index]);
}

// A score, still to be multiplied by score_scale.on_score_log2, and its derivative by scale * q.k.
struct Score {
  float value, d_score;
};

template <bool kGeneral, class AnyPlace>
FASTATTN_DEVICE Score score_of(float product, const Params& p, AnyPlace place, int row, int column) {
  Score score{product * p.score_scale.on_query, 1};
  if constexpr (kGeneral) {
    if (p.softcap > 0) {
      const float capped = tanhf(score.value / p.softcap);
      score = {p.softcap * capped, (1 - capped) * (1 + capped)};
    }
    const int query = place.query(row, column), key = place.key(row, column);
    const bool exists = query < p.queries.n && key < p.keys.n;
    if (exists && p.bias.data) {
      score.value += entry(p.bias, p.bias_dtype, p.bias.index(place.b, place.head(row), query, key));
    }
    if (exists && p.alibi_slopes) {
      score.value -= p.alibi_slopes[place.b * p.H + place.head(row)] * p.distance(place.b, query, key);
    }
  }
  return score;
}

// Turns products into scores.
template <bool kGeneral, class AnyPlace, int kRowBlocks, int kColumnBlocks>
FASTATTN_DEVICE void finish_scores(Sums (&products)[kRowBlocks][kColumnBlocks], const Params& p, AnyPlace place) {
  if (!kGeneral && p.score_scale.on_query == 1) return;
  each([&](float& x, int row, int column) { x = score_of<kGeneral>(x, p, place, row, column).value; }, products);
}

// The visible columns of a row, of those that this lane holds: bit 2 c + e stands for column 8 c + 2 (lane() % 4) + e.
// The loop is not unrolled: a tile of sums leaves few registers.
template <int kColumnBlocks, class IsVisible>
FASTATTN_DEVICE uint32_t visible_columns(IsVisible visible) {
  static_assert(2 * kColumnBlocks <= 32);
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 2 * kColumnBlocks; ++i) bits |= uint32_t(visible(i / 2 * 8 + 2 * (lane() % 4) + i % 2)) << i;
  return bits;
}

// The same for the columns below `end`.
template <int kColumnBlocks>
FASTATTN_DEVICE uint32_t columns_below(int64_t end) {
  const int below = int(clamp(end, 0, 8 * kColumnBlocks)), in_last = below % 8 - 2 * (lane() % 4);
  const int count = below / 8 * 2 + (in_last <= 0 ? 0 : in_last == 1 ? 1 : 2);
  return count == 32 ? ~0u : (1u << count) - 1;
}

// The same for the columns that row `row` sees by its position alone, where positions increase by one. From the keys
// the band looks as from the queries, with the sides exchanged.
template <int kColumnBlocks, class AnyPlace>
FASTATTN_DEVICE uint32_t columns_in_band(const Params& p, AnyPlace place, int row) {
  constexpr bool kRowsAreQueries = AnyPlace::kRowsAreQueries;
  const Band band = kRowsAreQueries ? p.band : Band{p.band.right, p.band.left};
  const int64_t start = p.queries.position_of(place.b, 0),
                token = kRowsAreQueries ? place.query(row, 0) : place.key(row, 0);
  const KeyRange seen =
      visible_keys(band, kRowsAreQueries ? token + start : token - start, kRowsAreQueries ? p.keys.n : p.queries.n);
  return columns_below<kColumnBlocks>(seen.end - place.first_column) &
         ~columns_below<kColumnBlocks>(seen.begin - place.first_column);
}

// The visible pairs of a tile: the columns of each row that this lane holds. Queries of padding do not count.
template <int kRowBlocks, int kColumnBlocks>
struct VisiblePairs {
  uint32_t columns[2 * kRowBlocks];

  FASTATTN_DEVICE bool at(int row, int column) const { return columns[row / 8] >> (column / 8 * 2 + column % 2) & 1; }
};

template <bool kGeneral, int kRowBlocks, int kColumnBlocks, class AnyPlace>
FASTATTN_DEVICE VisiblePairs<kRowBlocks, kColumnBlocks> visible_pairs(const Params& p, AnyPlace place) {
  uint32_t real = ~0u;
  if (AnyPlace::kRowsAreQueries && (p.keys.real || p.queries.position)) {
    real = visible_columns<kColumnBlocks>(
        [&](int column) { return p.keys.is_real(place.b, place.first_column + column); });
  }
  VisiblePairs<kRowBlocks, kColumnBlocks> visible;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = 8 * i + lane() / 4;
    visible.columns[i] = real;
    if (!p.queries.position) visible.columns[i] &= columns_in_band<kColumnBlocks>(p, place, row);
    if (p.queries.position || (kGeneral && p.dense.data)) {
      visible.columns[i] &= visible_columns<kColumnBlocks>([&](int column) {
        const int query = place.query(row, column), key = place.key(row, column);
        return query < p.queries.n && key < p.keys.n && p.sees<kGeneral>(place.b, place.head(row), query, key);
      });
    }
  }
  return visible;
}

// Sets the scores of hidden pairs to -inf.
template <bool kGeneral, class AnyPlace, int kRowBlocks, int kColumnBlocks>
FASTATTN_DEVICE void hide(Sums (&scores)[kRowBlocks][kColumnBlocks], const Params& p, AnyPlace place) {
  const auto visible = visible_pairs<kGeneral, kRowBlocks, kColumnBlocks>(p, place);
  each(
      [&](float& x, int row, int column) {
        if (!visible.at(row, column)) x = -kInfinity;
      },
      scores);
}

template <class AnyPlace>
FASTATTN_DEVICE bool survives_dropout(const Params& p, AnyPlace place, int row, int column) {
  const uint32_t query = place.query(row, column), key = place.key(row, column);
  // Those beyond the ends have no places, and need no words.
  const bool exists = query < uint32_t(p.queries.n) && key < uint32_t(p.keys.n);
  const Places places = exists ? p.dropout.places : Places{};
  const PhiloxWords words = philox(philox_key(*p.seed), places.counter(place.b, place.head(row), query, key / 4));
  const uint32_t word = key % 4 == 0 ? words.x0 : key % 4 == 1 ? words.x1 : key % 4 == 2 ? words.x2 : words.x3;
  return word >= p.dropout.threshold;
}

}  // namespace fastattn::cuda
