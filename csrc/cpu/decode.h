// Forward for a few queries, such as the next token against a cache of keys. There are no queries to fill the lanes
// with, so they are the head dim: S = Q K^T by dot products, and O = P V with V as it lies in memory. The heads that
// share keys share one pass over them, and the keys are split into parts, each with its own softmax, so that there is
// work for every thread; combine() joins the parts (as in Dao et al. 2023, Flash-Decoding).
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arith.h"
#include "bias.h"
#include "blocks.h"
#include "forward.h"
#include "matrix.h"
#include "params.h"
#include "quantize.h"
#include "rows.h"
#include "vector.h"
#include "vector_product.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kDecodeKeys = 256;  // that are read before their values are

constexpr int kRowsAtOnce = 4;  // for which a key is read once

int64_t most_decode_rows(const Params& p) { return p.group() * p.n_q; }

struct DecodeScratch {
  float *q, *k, *v;  // rows of units; those of keys are copies, where they are needed
  float* s;          // [rows, kDecodeKeys], S and then P, of elements as the units have them
  int64_t size;

  DecodeScratch(const Params& p, float* base) {
    Arena arena(base);
    const int64_t rows = most_decode_rows(p), keys = lesser(kDecodeKeys, padded(p.n_k));
    q = arena.take(rows * units(p.d_qk));
    k = arena.take(keys * units(p.d_qk));
    v = arena.take(keys * units(p.d_v));
    s = arena.take(rows * kDecodeKeys);
    size = arena.used();
  }
};

// Rows of the heads that share keys, query by query: those of a document follow each other.
int64_t decode_rows(const Params& p, int64_t b) { return p.group() * p.queries[b].count; }

struct HeadAndQuery {
  int64_t h, query;
};

HeadAndQuery head_and_query(const Params& p, int64_t b, int64_t h_kv, int64_t row) {
  return {h_kv * p.group() + row % p.group(), p.queries[b].at(row / p.group())};
}

// What a part keeps of a row: the sum of weights times values, the score m that the weights are
// measured from, the sum l of the weights.
struct DecodePart {
  float *o, *m, *l;
};

constexpr int64_t row_of_part(const Params& p) { return padded(p.d_v) + kLanes; }
int64_t parts_size(const Params& p) { return most_decode_rows(p) * row_of_part(p); }

DecodePart decode_part(const Params& p, float* parts, const DecodeItem& item, int64_t part, int64_t row) {
  float* o = parts + (item.first_part + part) * parts_size(p) + row * row_of_part(p);
  return {o, o + padded(p.d_v), o + padded(p.d_v) + 1};
}

FASTATTN_INLINE float sum_of_lanes(Floats x) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

// Rows in memory that are read together, several times: they stay in the L1 cache, and so do those that come next.
inline int64_t rows_of_chunk(const Input& x, int64_t d) {
  constexpr int64_t kChunkBytes = 16 << 10;
  return greater(kChunkBytes / greater(d * bytes_of(x.dtype), 1) / kLanes, 1) * kLanes;
}

constexpr bool is_of_vectors(int64_t d) { return d % (kLanes * kPerUnit) == 0; }

// The cache lines that a thread reads in items that follow each other, each of which is prefetched when so many bytes
// are still to be read before it: the processor's own prefetching stops at the end of a page of memory, and takes in
// only what is read in order.
class LinesToCome {
 public:
  // Of an item whose blocks of keys begin at `begin` and end at `end` or after it, and then of the next one.
  LinesToCome(const Params& p, const DecodeItem& item, int64_t begin, int64_t end, const DecodeItem* next)
      : p_(p), item_(&item), next_(next), block_(begin), place_(begin), end_of_item_(end) {
    // A whole block is copied without a pause.
    const bool copied = !is_of_vectors(p.d_qk | p.d_v) && !reads_some_units(p.k.dtype);
    // Rows of 8 bits take longer for each byte.
    const int64_t ahead = copied ? 48 << 10 : p.k.dtype == DType::i8 ? 8 << 10 : 12 << 10;
    // A few short rows are read before a prefetch of those that come next is worth its time.
    constexpr int64_t kFewBytes = 1 << 10;
    if ((item.last_key - item.first_key) * p.d_qk * bytes_of(p.k.dtype) <= kFewBytes) {
      due_ = INT64_MIN / 2;
      return;
    }
    item.is_begun&& begin == item.first_key ? skip(ahead) : step(ahead);
  }

  // Follows as so many bytes are read.
  FASTATTN_INLINE void step(int64_t bytes) {
    for (due_ += bytes; due_ > 0;) {
      if (line_ >= end_) next_row();
      const char* line = line_;  // in registers: this runs for every line that is read
      int64_t due = due_;
      for (const char* const end = end_; due > 0 && line < end; due -= kLine, line += kLine) {
        __builtin_prefetch(line, 0, kIntoL2);
      }
      line_ = line, due_ = due;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kIntoL2 = 2;  // the L1 cache waits for few lines at a time, and loads would wait with them

  static constexpr int64_t up_to_line(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

  // Those bytes have been prefetched, as far as they are of this item.
  void skip(int64_t bytes) {
    const DecodeItem* const item = item_;
    for (due_ += bytes; due_ > 0;) {
      if (line_ >= end_) next_row();
      if (item_ != item) return;
      const int64_t bytes_of_lines = up_to_line(lesser(due_, end_ - line_));
      if (bytes_of_lines <= 0) return;  // there are no more rows
      line_ += bytes_of_lines, due_ -= bytes_of_lines;
    }
  }

  FASTATTN_ONCE void next_row() {
    if (rows_ == 0 && !next_rows()) {
      due_ = INT64_MIN / 2;
      return;
    }
    line_ = row_, end_ = row_ + bytes_of_row_;
    row_ += stride_, --rows_;
  }

  // The rows that are read next: those on a page, or all keys of a block, and then its values.
  bool next_rows() {
    const int64_t last = lesser(block_ + kDecodeKeys, item_->last_key), d = of_values_ ? p_.d_v : p_.d_qk;
    if (place_ >= last || d == 0) {
      if (of_values_) block_ = last;
      of_values_ = !of_values_, place_ = block_;
      if (!of_values_ && block_ >= end_of_item_) {
        if (!next_) return false;
        item_ = next_, next_ = nullptr, block_ = place_ = item_->first_key, end_of_item_ = item_->last_key;
      }
      return next_rows();
    }
    const Input& x = of_values_ ? p_.v : p_.k;
    const IndexList& keys = p_.keys[item_->b];
    const int64_t key = keys.at(place_), bytes = bytes_of(x.dtype);
    rows_ = last - place_;
    if (x.table) rows_ = lesser(rows_, x.page_rows - key % x.page_rows);
    place_ += rows_;
    row_ = x.row(item_->b, item_->h_kv, key), stride_ = x.row_stride * bytes, bytes_of_row_ = d * bytes;
    if (x.scales) prefetch_scales(x.scale(item_->b, item_->h_kv, key), x.row_stride_of_scales * 4, rows_);
    if (stride_ < bytes_of_row_ + kLine) bytes_of_row_ += (rows_ - 1) * stride_, rows_ = 1;
    return true;
  }

  static void prefetch_scales(const float* scales, int64_t stride, int64_t rows) {
    const auto* line = reinterpret_cast<const char*>(scales);
    const int64_t together = stride < kLine ? kLine / greater(stride, 1) : 1;
    for (int64_t i = 0; i < rows; i += together, line += together * stride) __builtin_prefetch(line, 0, kIntoL2);
  }

  const Params& p_;
  const DecodeItem *item_, *next_;
  int64_t block_, place_, end_of_item_;
  bool of_values_ = false;
  const char *row_ = nullptr, *line_ = nullptr, *end_ = nullptr;
  int64_t stride_ = 0, bytes_of_row_ = 0, rows_ = 0;
  int64_t due_ = 0;
};

// Rows that are read by whole vectors of units, with what comes after them; but for their last one, if `kEndsWithin`.
template <class Element, bool kEndsWithin = false>
struct Stream {
  const Element* data;
  int64_t stride;
  int64_t d;  // elements of a row from `data` on
  LinesToCome* to_come;
  int64_t bytes_of_row;       // that one pass over them counts as read
  int64_t steps_at_once = 1;  // of a sum over the rows, a power of two

  FASTATTN_INLINE Floats row(int64_t i, int64_t vector) const {
    const int64_t at = vector * kLanes * kPerUnit;
    if constexpr (kEndsWithin) {
      return load_some_units(data + i * stride + at, d - at);
    } else {
      return load_units(data + i * stride + at);
    }
  }
  // As the right factor of a sum over the rows.
  FASTATTN_INLINE Floats operator()(int64_t step, int64_t vector) const {
    if (vector == 0 && (step & (steps_at_once - 1)) == 0) to_come->step(steps_at_once * kPerUnit * bytes_of_row);
    return across_rows([&](int64_t i, int64_t c) { return row(i, c); }, step, vector);
  }
  // To count what is read takes longer than to read a short row, so that is done for several.
  Stream at_column(int64_t column, int64_t bytes) const {
    constexpr int64_t kCounted = 256;
    int64_t steps = 1;
    while (2 * steps <= kLanes / kPerUnit && 2 * steps * kPerUnit * bytes <= kCounted) steps *= 2;
    return {data + column, stride, d - column, to_come, bytes, steps};
  }
};

// Keys whose products with R rows the registers hold: a power of two, so that it divides the lanes.
template <int R>
constexpr int kKeysAtOnce = R == 1                                          ? kLanes
                            : 8 * R <= FASTATTN_ACCUMULATORS && kLanes >= 8 ? 8
                            : 4 * R <= FASTATTN_ACCUMULATORS                ? 4
                                                                            : 2;

// s[row, first + i] = q[row] . k[first + i] for fewer than kLanes keys, and zeros in the other lanes: the same sums, in
// the same order, as dot_products.
template <class Keys>
FASTATTN_ONCE void dot_products_of_few(const float* q, int64_t rows, Keys k, int64_t first, int64_t n, int64_t d,
                                       float* s) {
  k.to_come->step(n * k.bytes_of_row);
  for (int64_t row = 0; row < rows; ++row, q += units(d), s += kDecodeKeys) {
    Floats products[kLanes] = {};
    for (int64_t key = 0; key < n; ++key) {
      Floats sum = {};
      for (int64_t vector = 0; vector < units(d) / kLanes; ++vector) {
        sum = multiply_add(load(q + vector * kLanes), k.row(first + key, vector), sum);
      }
      products[key] = sum;
    }
    store(s + first, sums_of_lanes(products));
  }
}

// s[row, i] = q[row] . k[i] for R rows and n keys, and zeros up to a multiple of kLanes. What is read of a key serves
// all rows.
template <int R, class Keys>
FASTATTN_INLINE void dot_products(const float* q, Keys k, int64_t n, int64_t d, float* s) {
  constexpr int kKeys = kKeysAtOnce<R>, kRowsOfVector = kKeys < kLanes ? kLanes / kKeys : 1;
  const int64_t bytes_of_vector = k.bytes_of_row * kLanes / greater(units(d), 1), rest = n % kLanes;
  for (int64_t i = 0; i < n - rest; i += kKeys) {
    Floats products[R * kKeys / kLanes][kLanes] = {};  // those of a row side by side
    for (int64_t vector = 0; vector < units(d) / kLanes; ++vector) {
      k.to_come->step(kKeys * bytes_of_vector);
      Floats part_of_q[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) part_of_q[r] = load(q + r * units(d) + vector * kLanes);
#pragma GCC unroll 16
      for (int key = 0; key < kKeys; ++key) {
        const Floats part_of_k = k.row(i + key, vector);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          Floats& sum = products[(r * kKeys + key) / kLanes][(r * kKeys + key) % kLanes];
          sum = multiply_add(part_of_q[r], part_of_k, sum);
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < R * kKeys / kLanes; ++j) {
      const Floats sums = sums_of_lanes(products[j]);
      float* const to = s + j * kLanes / kKeys * kDecodeKeys + i + j * kLanes % kKeys;
      if constexpr (kRowsOfVector == 1) {
        store(to, sums);
      } else {
        alignas(64) float of_rows[kLanes];
        store(of_rows, sums);
        for (int r = 0; r < kRowsOfVector; ++r) {
          __builtin_memcpy(to + r * kDecodeKeys, of_rows + r * kKeys, kKeys * sizeof(float));
        }
      }
    }
  }
  if (rest > 0) dot_products_of_few(q, R, k, n - rest, rest, d, s);
}

// Turns the products of one query with the n keys at the places first, ... of a list, in whole vectors, into scores.
FASTATTN_ONCE void finish_scores_of_query(const Params& p, int64_t b, int64_t h, int64_t query, const IndexList& list,
                                          int64_t first, int64_t n, float* s) {
  auto scale = static_cast<float>(p.scale < 0 ? -p.scale : p.scale);  // its sign is on the query
  if (p.softcap > 0) cap_scores(p, padded(n), s, nullptr), scale = 1.0f;
  const KeyBlock keys{&list, first, n, {}, {}, {}, {}};
  if (p.bias.data) {
    with_elements(p.bias.row(b, h, query), p.bias_dtype, [&](auto* row) {
      for (int64_t i = 0; i < n; i += kLanes) {
        const FewKeys few(keys, {0, n}, i);
        const bool as_it_lies = few.side_by_side && !p.bias.one_for_all_keys;
        const Floats bias = as_it_lies ? widen(row + few.at(0)) : few.gathered(row, p.bias.one_for_all_keys);
        store(s + i, load(s + i) * scale + bias);
      }
    });
    scale = 1.0f;
  }
  if (p.alibi_slopes) {
    const float slope = p.alibi_slopes[b * p.H + h];
    const QueryPosition position(p, b, query);
    for (int64_t i = 0; i < n; i += kLanes) {
      Ints behind{};
      for (int64_t j = 0; j < lesser(kLanes, n - i); ++j)
        behind[j] = position.near - key_position(p, b, keys.key(i + j));
      store(s + i, load(s + i) * scale - slope * (absolute(behind) + position.beyond));
    }
  }
}

// Turns a row of S into P, and updates its statistics and the output so far.
void softmax_step(const Params& p, float headroom, int64_t n, float* s, float& m, float& l, float* o) {
  const float on_score_log2 = p.on_score_log2();
  Floats largest = splat(m);
  for (int64_t i = 0; i < n; i += kLanes) largest = larger(load(s + i), largest);
  const float new_m = largest_lane(largest), reference = finite_max(new_m);
  if (new_m != m) {
    if (m != -kInfinity) {  // else O is 0 still
      const Floats decay = exp2(splat((m - reference) * on_score_log2));
      for (int64_t d = 0; d < padded(p.d_v); d += kLanes) store(o + d, load(o + d) * decay);
      l *= decay[0];
    }
    m = new_m;
  }
  Floats sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats weights = weight(load(s + i), splat(reference), on_score_log2, headroom);
    sum += weights;
    narrow(reinterpret_cast<LeftElement*>(s) + i, weights);
  }
  l += sum_of_lanes(sum);
}

// use(some rows by whole vectors, the first of them, their number, their scales), for all rows of n keys, in
// multiples of `together`: in the dtype they have in memory where they can be read there, chunk by chunk, else as
// copied units, with rows of zeros. Scales, up to a multiple of kLanes, are null where the rows are what they should
// be. Each chunk takes some passes.
template <class Use>
FASTATTN_INLINE void with_vectors(const Input& x, int64_t b, int64_t h, const IndexList& keys, int64_t first, int64_t n,
                                  int64_t d, int64_t together, float* copy, int64_t passes, LinesToCome& to_come,
                                  Use use) {
  const bool by_vectors = is_of_vectors(d), reads_in_place = by_vectors || reads_some_units(x.dtype);
  const bool pages_are_vectors = x.table && x.page_rows % kLanes == 0 && keys.at(first) % kLanes == 0;
  const bool in_steps = x.in_steps(keys, first, n) || (pages_are_vectors && keys.consecutive(first, n));
  const int64_t in_place = reads_in_place && in_steps ? n / together * together : 0;
  const int64_t bytes_of_row = (d * bytes_of(x.dtype) + passes - 1) / passes;
  with_rows_of_units(x, [&](auto* data) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    [[maybe_unused]] float scales[kDecodeKeys];
    for (int64_t i = 0, end; i < in_place; i = end) {
      const int64_t key = keys.at(first + i);
      end = lesser(in_place, i + rows_of_chunk(x, d));
      if (x.table) end = lesser(end, i + x.page_rows - key % x.page_rows);
      const float* of_rows = nullptr;
      if constexpr (kIsScaled<Element>) {
        of_rows = x.scale(b, h, key);
        if (x.row_stride_of_scales != 1 || (end - i) % kLanes != 0) {
          for (int64_t j = 0; j < padded(end - i); ++j) {
            scales[j] = j < end - i ? of_rows[j * x.row_stride_of_scales] : 0.0f;
          }
          of_rows = scales;
        }
      }
      const auto* rows = reinterpret_cast<const Element*>(x.row(b, h, key));
      if constexpr (reads_some_units(kDTypeOf<Element>)) {
        if (!by_vectors) {
          use(Stream<Element, true>{rows, x.row_stride, d, &to_come, bytes_of_row}, i, end - i, of_rows);
          continue;
        }
      }
      use(Stream<Element>{rows, x.row_stride, d, &to_come, bytes_of_row}, i, end - i, of_rows);
    }
  });
  if (in_place == n) return;
  const int64_t rest = n - in_place, n_padded = (rest + together - 1) / together * together;
  const Rows rows = rows_of(x, b, h, keys, first + in_place, rest, n_padded, d, true, copy);
  const auto* data = reinterpret_cast<const LeftElement*>(rows.data);
  use(Stream<LeftElement>{data, rows.stride * kPerUnit, d, &to_come, bytes_of_row}, in_place, n_padded, nullptr);
}

// Rows of weights in a tile of C vectors of columns: those of eight leave registers for the values.
template <int C>
constexpr int kTileRowsOfWeights = C == 8 && kTileRows<C> > 2 ? 2 : kTileRows<C>;

// The fewer rows there are, the more columns are added up at once, so that there are sums enough to hide how long an
// addition takes.
template <class Run>
FASTATTN_INLINE void each_column_tile_for(int64_t rows, int64_t columns, Run run) {
  const auto tiles_of = [&](auto most) {
    each_tile<decltype(most)::value>(0, columns / kLanes, [&](auto vectors, int64_t i) { run(vectors, i * kLanes); });
  };
  if (rows <= kTileRowsOfWeights<8>) return tiles_of(std::integral_constant<int, 8>{});
  if (rows <= kTileRowsOfWeights<4>) return tiles_of(std::integral_constant<int, 4>{});
  tiles_of(std::integral_constant<int, kColumns>{});
}

// to += weights * v for some rows of weights and n keys, a multiple of kPerUnit, and C vectors of columns.
template <int C, class Values>
FASTATTN_ONCE void add_values(Target to, int64_t rows, int64_t n, Rows weights, Values v) {
  each_tile<kTileRowsOfWeights<C>>(0, rows, [&](auto tile_rows, int64_t i) {
    Floats sums[decltype(tile_rows)::value][C];
    vector_product(n / kPerUnit, weights.at_row(i), v, sums);
    each_vector(sums, [&](Floats& x, int r, int c) { store(to.at(i + r, c), load(to.at(i + r, c)) + x); });
  });
}

// s[row, i] *= scales[i] for n keys, and up to a multiple of kLanes; nothing where there are no scales.
void multiply_columns(float* s, int64_t rows, int64_t n, const float* scales) {
  for (int64_t row = 0; scales && row < rows; ++row, s += kDecodeKeys) {
    for (int64_t i = 0; i < n; i += kLanes) store(s + i, load(s + i) * load(scales + i));
  }
}

void decode(const Params& p, const DecodeItem& item, DecodeItem* next, float* parts, float* scratch) {
  const DecodeScratch w(p, scratch);
  const int64_t b = item.b, h_kv = item.h_kv, rows = decode_rows(p, b);
  const IndexList &queries = p.queries[b], &key_list = p.keys[b];
  const float headroom = headroom_log2(p);
  KeyRange visible[kDecodeRows], seen{p.n_k, 0};
  uint32_t gaps[kDecodeRows];
  for (int64_t row = 0; row < rows; ++row) {
    const auto [h, query] = head_and_query(p, b, h_kv, row);
    float* q = w.q + row * units(p.d_qk);
    read_units(p.q, b, h, queries, row / p.group(), 1, p.d_qk, q);
    for (int64_t i = 0; i < units(p.d_qk); i += kLanes) {
      store(q + i, times_on_query(load(q + i), split_scale(p.scale).on_query));
    }
    visible[row] = p.visible(b, h, query), gaps[row] = p.gaps(b, h, query);
    seen = hull(seen, visible[row]);
    DecodePart part = decode_part(p, parts, item, item.part, row);
    *part.m = -kInfinity, *part.l = 0;
    __builtin_memset(part.o, 0, padded(p.d_v) * sizeof(float));
  }

  const int64_t begin = greater(item.first_key, key_list.lower_bound(seen.begin) / kDecodeKeys * kDecodeKeys);
  const int64_t end = lesser(item.last_key, key_list.lower_bound(seen.end));
  if (begin >= end) return;
  LinesToCome to_come(p, item, begin, end, next);
  const auto sees = [&](int64_t row, int64_t key) {
    const auto [h, query] = head_and_query(p, b, h_kv, row);
    return visible[row].contains(key) && !p.in_gap(gaps[row], b, h, query, key);
  };
  // What a row without gaps sees of a block takes no look at each key.
  const auto sees_some = [&](int64_t row, KeyRange block, int64_t first, int64_t n) {
    if (!gaps[row]) return visible[row].meets(block);
    for (int64_t i = 0; i < n; ++i) {
      if (sees(row, key_list.at(first + i))) return true;
    }
    return false;
  };
  const auto attend = [&](int64_t first, int64_t n) {
    const int64_t n_padded = padded(n);
    const KeyRange block{key_list.at(first), key_list.at(first + n - 1) + 1};
    int64_t row_begin = 0, row_end = rows;  // that see some of these keys, and those in between
    while (row_end > 0 && !sees_some(row_end - 1, block, first, n)) --row_end;
    while (row_begin < row_end && !sees_some(row_begin, block, first, n)) ++row_begin;
    if (row_begin == row_end) return;
    const int64_t rows_seeing = row_end - row_begin, tiles = (rows_seeing + kRowsAtOnce - 1) / kRowsAtOnce;
    with_vectors(p.k, b, h_kv, key_list, first, n, p.d_qk, 1, w.k, tiles, to_come,
                 [&](auto k, int64_t i, int64_t n_rows, const float* scales) {
                   each_tile<kRowsAtOnce>(row_begin, row_end, [&](auto tile, int64_t row) {
                     dot_products<tile>(w.q + row * units(p.d_qk), k, n_rows, p.d_qk, w.s + row * kDecodeKeys + i);
                   });
                   multiply_columns(w.s + row_begin * kDecodeKeys + i, row_end - row_begin, n_rows, scales);
                 });
    for (int64_t row = row_begin; row < row_end; ++row) {
      float* s = w.s + row * kDecodeKeys;
      if (p.finishes_scores()) {
        const auto [h, query] = head_and_query(p, b, h_kv, row);
        finish_scores_of_query(p, b, h, query, key_list, first, n, s);
      }
      if (n == n_padded && !gaps[row] && visible[row].begin <= block.begin && block.end <= visible[row].end) continue;
      const auto place = [&](int64_t key) { return lesser(greater(key_list.lower_bound(key) - first, 0), n); };
      const int64_t seen_begin = place(visible[row].begin), seen_end = place(visible[row].end);
      for (int64_t i = 0; i < seen_begin; ++i) s[i] = -kInfinity;
      for (int64_t i = seen_begin; gaps[row] && i < seen_end; ++i) {
        if (!sees(row, key_list.at(first + i))) s[i] = -kInfinity;
      }
      for (int64_t i = seen_end; i < n_padded; ++i) s[i] = -kInfinity;
    }
    for (int64_t row = row_begin; row < row_end; ++row) {
      const DecodePart part = decode_part(p, parts, item, item.part, row);
      softmax_step(p, headroom, n_padded, w.s + row * kDecodeKeys, *part.m, *part.l, part.o);
    }
    const Target o{decode_part(p, parts, item, item.part, row_begin).o, row_of_part(p)};
    const int64_t tiles_of_values = (rows_seeing + kTileRows<kColumns> - 1) / kTileRows<kColumns>;
    with_vectors(p.v, b, h_kv, key_list, first, n, p.d_v, kPerUnit, w.v, tiles_of_values, to_come,
                 [&](auto v, int64_t i, int64_t n_rows, const float* scales) {
                   multiply_columns(w.s + row_begin * kDecodeKeys + i, row_end - row_begin, n_rows, scales);
                   each_column_tile_for(rows_seeing, padded(p.d_v), [&](auto vectors, int64_t column) {
                     const Target to{o.data + column, o.stride};
                     const Rows weights{w.s + row_begin * kDecodeKeys + i / kPerUnit, kDecodeKeys};
                     add_values<vectors>(to, row_end - row_begin, n_rows, weights,
                                         v.at_column(column, v.bytes_of_row * vectors * kLanes / padded(p.d_v)));
                   });
                 });
  };
  for (int64_t first = begin; first < end; first += kDecodeKeys) {
    attend(first, lesser(kDecodeKeys, item.last_key - first));
  }
  if (next) next->is_begun = true;
}

// Joins the parts of the heads that share keys, and writes their outputs and lse. of_head: any item of theirs.
void combine(const Params& p, const ForwardOutputs& out, const DecodeItem& of_head, float* parts) {
  const int64_t b = of_head.b, h_kv = of_head.h_kv, n_parts = of_head.n_parts;
  const float on_score_log2 = p.on_score_log2();
  for (int64_t row = 0; row < decode_rows(p, b); ++row) {
    const auto [h, query] = head_and_query(p, b, h_kv, row);
    float m = -kInfinity, l = 0;
    for (int64_t i = 0; i < n_parts; ++i) {
      const float part_m = *decode_part(p, parts, of_head, i, row).m;
      m = part_m > m ? part_m : m;
    }
    const DecodePart total = decode_part(p, parts, of_head, 0, row);
    for (int64_t i = 0; i < n_parts; ++i) {
      const DecodePart part = decode_part(p, parts, of_head, i, row);
      const Floats decay = exp2(splat((*part.m - finite_max(m)) * on_score_log2));
      l += *part.l * decay[0];
      for (int64_t d = 0; d < padded(p.d_v); d += kLanes) {
        const Floats sum = i == 0 ? Floats{} : load(total.o + d);
        store(total.o + d, sum + load(part.o + d) * decay);
      }
    }
    const float sum = std::ldexp(l, static_cast<int>(headroom_log2(p)));
    BesideSink whole{lse_of(m, on_score_log2, log2f(sum)), 1.0};
    if (p.sinks) whole = beside_sink(whole.lse, p.sinks[h]);
    if (l == 0) {
      zero_row(out.o, b, h, query, p.d_v);
    } else {
      write_row(out.o, b, h, query, p.d_v, total.o, static_cast<float>(whole.share) / l);
    }
    out.lse[(b * p.H + h) * p.n_q + query] = static_cast<float>(whole.lse);
    if (out.measures) {
      const float with_sink = sum / static_cast<float>(whole.share);
      out.measures[(b * p.H + h) * p.n_q + query] = Measure::of(m, with_sink, on_score_log2);
    }
  }
  for (int64_t h = h_kv * p.group(); h < (h_kv + 1) * p.group(); ++h) write_padding(p, out, b, h, 0, p.n_q);
}

int64_t decode_scratch(const Params& p) { return DecodeScratch(p, nullptr).size; }

const DecodeKernels decode_kernels = {parts_size, decode_scratch, decode, combine, quantize};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
