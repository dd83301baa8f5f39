// From products q.k to scores, and which of them may be seen.
#pragma once

#include "tile.cuh"

namespace fastattn::cuda {

// Where a warp's sums stand in a head: row 0 and column 0 of them. The rows are queries and the columns keys, or the other
// way round.
template <bool kRowsAreQueries>
struct Place {
  int b, h, first_row, first_column;

  FASTATTN_DEVICE int query(int row, int column) const { return kRowsAreQueries ? first_row + row : first_column + column; }
  FASTATTN_DEVICE int key(int row, int column) const { return kRowsAreQueries ? first_column + column : first_row + row; }
};

FASTATTN_DEVICE float entry(const Table& table, DType dtype, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(table.data)[index];
  return dtype == DType::bf16 ? to_float(static_cast<const bf16*>(table.data)[index])
                              : to_float(static_cast<const f16*>(table.data)[index]);
}

// Products become scores that count from the same zero as `Problem::scale` says. With a softcap `steepness`, unless null,
// gets the derivative of each by scale * q.k.
template <bool kGeneral, bool kRowsAreQueries, int kRowBlocks, int kColumnBlocks>
FASTATTN_DEVICE void finish_scores(Sums (&products)[kRowBlocks][kColumnBlocks], const Problem& p,
                                   Place<kRowsAreQueries> place) {
  const float on_query = p.scale.on_query;
  if (kGeneral || on_query != 1) each(products, [&](float& s, int, int) { s *= on_query; });
  if constexpr (kGeneral) {
    if (p.softcap > 0) each(products, [&](float& s, int, int) { s = p.softcap * tanhf(s / p.softcap); });
    if (p.bias.data) {
      each(products, [&](float& s, int row, int column) {
        const int query = place.query(row, column), key = place.key(row, column);
        if (query < p.queries.n && key < p.keys.n) {
          s += entry(p.bias, p.bias_dtype, p.bias.index(place.b, place.h, query, key));
        }
      });
    }
  }
}

// Which of a row's columns are shown, of those that this lane holds: bit 2 c + e stands for column
// 8 c + 2 (lane() % 4) + e. Found in loops, not unrolled: a tile of sums leaves few registers.
template <int kColumnBlocks, class Shown>
FASTATTN_DEVICE uint32_t shown_columns(Shown shown) {
  static_assert(2 * kColumnBlocks <= 32);
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 2 * kColumnBlocks; ++i) bits |= uint32_t(shown(i / 2 * 8 + 2 * (lane() % 4) + i % 2)) << i;
  return bits;
}

// The same for the columns below `end`.
template <int kColumnBlocks>
FASTATTN_DEVICE uint32_t columns_below(int64_t end) {
  const int below = int(clamp(end, 0, 8 * kColumnBlocks)), in_last = below % 8 - 2 * (lane() % 4);
  const int count = below / 8 * 2 + (in_last <= 0 ? 0 : in_last == 1 ? 1 : 2);
  return count == 32 ? ~0u : (1u << count) - 1;
}

// The same for what the band of positions shows to row `row`, of tokens that stand one after the other. A query is seen by
// the keys as it sees them, with the sides exchanged.
template <int kColumnBlocks, bool kRowsAreQueries>
FASTATTN_DEVICE uint32_t columns_in_band(const Problem& p, Place<kRowsAreQueries> place, int row) {
  const Band band = kRowsAreQueries ? p.band : Band{p.band.right, p.band.left};
  const int64_t start = p.queries.position_of(place.b, 0), token = place.first_row + row;
  const KeyRange seen = visible_keys(band, kRowsAreQueries ? token + start : token - start,
                                     kRowsAreQueries ? p.keys.n : p.queries.n);
  return columns_below<kColumnBlocks>(seen.end - place.first_column) &
         ~columns_below<kColumnBlocks>(seen.begin - place.first_column);
}

// Puts `value` where the key may not be seen. What a query that is no real one sees does not matter.
template <bool kGeneral, bool kRowsAreQueries, int kRowBlocks, int kColumnBlocks>
FASTATTN_DEVICE void hide(Sums (&sums)[kRowBlocks][kColumnBlocks], float value, const Problem& p,
                          Place<kRowsAreQueries> place) {
  uint32_t real = ~0u;
  if (kRowsAreQueries && (p.keys.real || p.queries.position)) {
    real = shown_columns<kColumnBlocks>([&](int column) { return p.keys.is_real(place.b, place.first_column + column); });
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = 8 * i + lane() / 4;
    uint32_t shown = real;
    if (!p.queries.position) shown &= columns_in_band<kColumnBlocks>(p, place, row);
    if (p.queries.position || (kGeneral && p.dense.data)) {
      shown &= shown_columns<kColumnBlocks>([&](int column) {
        const int query = place.query(row, column), key = place.key(row, column);
        return query < p.queries.n && key < p.keys.n && p.sees<kGeneral>(place.b, place.h, query, key);
      });
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(shown >> (2 * c + e) & 1)) sums[i / 2][c][2 * (i % 2) + e] = value;
      }
    }
  }
}

// Calls visit(sum, kept) for all.
template <bool kRowsAreQueries, int kRowBlocks, int kColumnBlocks, class Visit>
FASTATTN_DEVICE void each_kept(Sums (&sums)[kRowBlocks][kColumnBlocks], const Problem& p, Place<kRowsAreQueries> place,
                               Visit visit) {
  each(sums, [&](float& s, int row, int column) {
    const int query = place.query(row, column), key = place.key(row, column);
    const PhiloxWords words =
        philox(p.dropout.key, {uint32_t(key / 4), uint32_t(query), uint32_t(place.h), uint32_t(place.b)});
    const uint32_t word = key % 4 == 0 ? words.x0 : key % 4 == 1 ? words.x1 : key % 4 == 2 ? words.x2 : words.x3;
    visit(s, word >= p.dropout.threshold);
  });
}

}  // namespace fastattn::cuda
