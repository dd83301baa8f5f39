// From products of queries and keys to scores: the softcap, what is added to them, and hidden keys that are no range;
// and the derivatives of all that. A call without any of this costs one branch a block.
//
// A bias and a dense mask lie in memory as rows of keys; S^T has rows of queries. They are transposed in tiles of
// kLanes * kLanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arith.h"
#include "blocks.h"
#include "matrix.h"
#include "params.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

struct Flag {
  uint8_t is_set;
};

// The bits 0 or 1, not a number. In two steps, for the first of which GCC 12 finds an instruction.
FASTATTN_INLINE Floats widen(const Flag* p) {
  typedef uint8_t Flags __attribute__((vector_size(kLanes)));
  typedef uint8_t FlagsInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));
  const Flags flags = *reinterpret_cast<const FlagsInMemory*>(p);
  return (Floats)widened_bits(__builtin_convertvector(flags, Halves));
}

FASTATTN_INLINE Floats splat_bits(Floats x, int64_t lane) { return (Floats)(Bits{} + ((Bits)x)[lane]); }

// Keys i, ..., i + n - 1 of a part of a block of keys, at most kLanes of them.
struct FewKeys {
  const KeyBlock& keys;
  int64_t first, n;
  bool side_by_side;  // and as many as there are lanes

  FewKeys(const KeyBlock& keys, Part part, int64_t i)
      : keys(keys),
        first(part.begin + i),
        n(lesser(kLanes, lesser(part.n, keys.n - part.begin) - i)),
        side_by_side(n == kLanes && keys.list->consecutive(keys.first + first, n)) {}

  int64_t at(int64_t j) const { return keys.key(first + j); }

  // Their entries in a row of a table, one by one: nothing is read that is not theirs.
  template <class Element>
  FASTATTN_ONCE Floats gathered(const Element* row, bool one_for_all) const {
    Element few[kLanes] = {};
    for (int64_t j = 0; j < n; ++j) few[j] = row[one_for_all ? 0 : at(j)];
    return widen(few);
  }
};

// visit(x, entries) for all vectors x in a matrix [part.n, C * kLanes] that belong to keys of the block.
template <class Element, class Visit>
FASTATTN_INLINE void with_entries(int C, const Table& table, int64_t b, int64_t h, const QueryBlock& queries,
                                  const KeyBlock& keys, Part part, float* x, Visit visit) {
  const auto row = [&](int c, int lane) {
    return reinterpret_cast<const Element*>(table.row(b, h, queries.index[c][lane]));
  };
  for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); i += kLanes) {
    const FewKeys few(keys, part, i);
    const auto at = [&](int64_t j, int c) { return x + ((i + j) * C + c) * kLanes; };
    if (table.query_stride == 0) {
      const Floats entries = few.gathered(row(0, 0), table.one_for_all_keys);
      for (int64_t j = 0; j < few.n; ++j) {
        for (int c = 0; c < C; ++c) visit(at(j, c), splat_bits(entries, j));
      }
      continue;
    }
    for (int c = 0; c < C; ++c) {
      Floats tile[kLanes];
      if (few.side_by_side && !table.one_for_all_keys) {
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) tile[lane] = widen(row(c, lane) + few.at(0));
        transpose(tile);
        float* to = at(0, c);
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j, to += C * kLanes) visit(to, tile[j]);
      } else {
        for (int lane = 0; lane < kLanes; ++lane) tile[lane] = few.gathered(row(c, lane), table.one_for_all_keys);
        transpose(tile);
        for (int64_t j = 0; j < few.n; ++j) visit(at(j, c), tile[j]);
      }
    }
  }
}

// Turns n products, whole vectors of them, into softcap * tanh(scale * s / softcap), in nats. `d_score`, unless null,
// is set to the derivative by scale * s.
FASTATTN_ONCE void cap_scores(const Params& p, int64_t n, float* s, float* d_score) {
  const double by_softcap = (p.scale < 0 ? -p.scale : p.scale) / p.softcap;  // the sign of scale is on the queries
  const auto factor = static_cast<float>(by_softcap < 0x1p127 ? by_softcap : 0x1p127);  // finite: 0 stays 0
  const auto softcap = static_cast<float>(p.softcap);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Tanh capped = tanh(load(s + i) * factor);
    store(s + i, capped.value * softcap);
    if (d_score) store(d_score + i, capped.derivative);
  }
}

// S^T becomes scale * S^T + bias, in nats. A bias of -inf stays -inf.
FASTATTN_ONCE void add_bias(int C, const Params& p, int64_t b, int64_t h, const QueryBlock& queries,
                            const KeyBlock& keys, Part part, float scale, float* s_t) {
  with_elements(p.bias.data, p.bias_dtype, [&](auto* data) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    with_entries<Element>(C, p.bias, b, h, queries, keys, part, s_t,
                          [&](float* x, Floats bias) { store(x, load(x) * scale + bias); });
  });
}

// The position of a query up to kFarthest, so that it fits 32 bits, and how far it lies beyond: so much longer are its
// distances to all keys.
struct QueryPosition {
  int32_t near;
  float beyond;

  QueryPosition(const Params& p, int64_t b, int64_t query) {
    constexpr int64_t kFarthest = 1 << 30;
    const int64_t position = p.position(b, query), nearest = clamp(position, -kFarthest, kFarthest);
    near = static_cast<int32_t>(nearest), beyond = std::fabs(static_cast<float>(position - nearest));
  }
};

FASTATTN_INLINE int32_t key_position(const Params& p, int64_t b, int64_t key) {
  return p.documents.rank_of_key ? p.documents.rank_of_key[b * p.n_k + key] : static_cast<int32_t>(key);
}

FASTATTN_INLINE Floats absolute(Ints x) { return __builtin_convertvector(x < 0 ? -x : x, Floats); }

// Those of a block of queries.
struct QueryPositions {
  Ints near[kColumns];
  Floats beyond[kColumns];

  QueryPositions(int C, const Params& p, int64_t b, const QueryBlock& queries) {
    for (int lane = 0; lane < C * kLanes; ++lane) {
      const QueryPosition position(p, b, queries.index[lane / kLanes][lane % kLanes]);
      near[lane / kLanes][lane % kLanes] = position.near, beyond[lane / kLanes][lane % kLanes] = position.beyond;
    }
  }

  FASTATTN_INLINE Floats distances(int c, int32_t key_position) const {
    return absolute(near[c] - key_position) + beyond[c];
  }
};

// S^T becomes scale * S^T - slope * distance, in nats.
FASTATTN_ONCE void add_alibi(int C, const Params& p, int64_t b, int64_t h, const QueryBlock& queries,
                             const KeyBlock& keys, Part part, float scale, float* s_t) {
  const QueryPositions positions(C, p, b, queries);
  const float slope = p.alibi_slopes[b * p.H + h];
  for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); ++i) {
    const int32_t position = key_position(p, b, keys.key(part.begin + i));
    for (int c = 0; c < C; ++c) {
      float* x = s_t + (i * C + c) * kLanes;
      store(x, load(x) * scale - slope * positions.distances(c, position));
    }
  }
}

// Sets to -inf what a dense mask and the documents hide inside the ranges of the queries.
FASTATTN_ONCE void hide_gaps(int C, const Params& p, int64_t b, int64_t h, const QueryBlock& queries,
                             const KeyBlock& keys, Part part, float* s_t) {
  if (queries.gaps & kDenseGaps) {
    with_entries<Flag>(C, p.dense, b, h, queries, keys, part, s_t,
                       [&](float* x, Floats flags) { store(x, (Bits)flags != 0 ? load(x) : splat(-kInfinity)); });
  }
  if (queries.gaps & kOtherDocuments) {
    Ints documents[kColumns];
    for (int lane = 0; lane < C * kLanes; ++lane) {
      const int64_t query = queries.index[lane / kLanes][lane % kLanes];
      documents[lane / kLanes][lane % kLanes] = p.documents.of_query[b * p.n_q + query];
    }
    for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); ++i) {
      const int32_t document = p.documents.of_key[b * p.n_k + keys.key(part.begin + i)];
      for (int c = 0; c < C; ++c) {
        float* x = s_t + (i * C + c) * kLanes;
        store(x, documents[c] == document ? load(x) : splat(-kInfinity));
      }
    }
  }
}

// Turns the products S^T of a part of the keys into scores, hidden ones -inf. `d_score` as in cap_scores.
FASTATTN_INLINE void finish_scores(int C, const Params& p, int64_t b, int64_t h, const QueryBlock& queries,
                                   const KeyBlock& keys, Part part, float* s_t, float* d_score = nullptr) {
  if (p.finishes_scores()) {
    auto scale = static_cast<float>(p.scale < 0 ? -p.scale : p.scale);  // its sign is on the queries
    if (p.softcap > 0) cap_scores(p, part.n * C * kLanes, s_t, d_score), scale = 1.0f;
    if (p.bias.data) add_bias(C, p, b, h, queries, keys, part, scale, s_t), scale = 1.0f;
    if (p.alibi_slopes) add_alibi(C, p, b, h, queries, keys, part, scale, s_t);
  }
  if (queries.gaps) hide_gaps(C, p, b, h, queries, keys, part, s_t);
  if (!queries.sees_all(keys, part.begin, part.n)) hide(C, queries, keys, part, s_t, -kInfinity);
}

// Adds numbers to sums, and what the rounding of these takes away to `lost` (Knuth's two-sum), if that is wanted.
template <class Number>
FASTATTN_INLINE Number added(Number sum, Number x, Number& lost) {
  const Number result = sum + x, x_of_it = result - sum;
  lost += (sum - (result - x_of_it)) + (x - x_of_it);
  return result;
}
FASTATTN_INLINE void add_to_sums(float* sums, int64_t lost, Floats x) {
  if (lost == 0) return store(sums, load(sums) + x);
  Floats so_far = load(sums + lost);
  store(sums, added(load(sums), x, so_far));
  store(sums + lost, so_far);
}
FASTATTN_INLINE void add_to_sum(float* sum, int64_t lost, float x) {
  float unused = 0;
  *sum = added(*sum, x, lost == 0 ? unused : sum[lost]);
}

// Adds dS, given as a left factor [part.n, C * kLanes], to the rows of the gradient of the bias.
FASTATTN_ONCE void add_d_bias(int C, const BackwardTensors& t, int64_t b, int64_t h, const QueryBlock& queries,
                              const KeyBlock& keys, Part part, const LeftElement* ds) {
  for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); i += kLanes) {
    const FewKeys few(keys, part, i);
    for (int c = 0; c < C; ++c) {
      Floats tile[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) tile[j] = widen(ds + (lesser(i + j, part.n - 1) * C + c) * kLanes);
      transpose(tile);
      const int64_t n_queries = lesser(kLanes, queries.n - c * kLanes);
      const auto row = [&](int64_t lane) { return t.d_bias.row(b, h, queries.index[c][lane]); };
      if (few.side_by_side && n_queries == kLanes) {
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
          add_to_sums(row(lane) + few.at(0), t.d_bias.lost, tile[lane]);
        }
      } else {
        for (int64_t lane = 0; lane < n_queries; ++lane) {
          for (int64_t j = 0; j < few.n; ++j) add_to_sum(row(lane) + few.at(j), t.d_bias.lost, tile[lane][j]);
        }
      }
    }
  }
}

// Adds the sum of each row of dS^T to the entry of its key.
FASTATTN_ONCE void add_d_column(int C, const QueryBlock& queries, const KeyBlock& keys, Part part,
                                const LeftElement* ds, float* d_column) {
  Ints is_query[kColumns];
  for (int64_t lane = 0; lane < C * kLanes; ++lane) is_query[lane / kLanes][lane % kLanes] = lane < queries.n ? -1 : 0;
  for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); ++i) {
    Floats sums = {};
    for (int c = 0; c < C; ++c) sums += is_query[c] ? widen(ds + (i * C + c) * kLanes) : Floats{};
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    d_column[keys.key(part.begin + i)] += sum;
  }
}

// Adds each query's share in the gradient of the slope to its lane.
FASTATTN_ONCE void add_d_slope(int C, const Params& p, int64_t b, const QueryBlock& queries, const KeyBlock& keys,
                               Part part, const LeftElement* ds, Floats* d_slope) {
  const QueryPositions positions(C, p, b, queries);
  for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); ++i) {
    const int32_t position = key_position(p, b, keys.key(part.begin + i));
    for (int c = 0; c < C; ++c) {
      d_slope[c] += widen(ds + (i * C + c) * kLanes) * positions.distances(c, position);
    }
  }
}

// Turns the gradient of scores, dS^T, into that of scale times the products, in the forms that the sums take.
template <int C>
FASTATTN_ONCE void times_d_score(int64_t n, const float* d_score, float* ds, float* ds_t) {
  for (int64_t i = 0; i < n; i += kPerUnit) {
    Floats x[kPerUnit][C];
    each_vector(x, [&](Floats& product, int r, int c) {
      const int64_t at = ((i + r) * C + c) * kLanes;
      product = widen(reinterpret_cast<const LeftElement*>(ds) + at) * load(d_score + at);
    });
    store_right(ds_t, i, x);
    if (!kOneForm) store_left(ds, i, x);
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
