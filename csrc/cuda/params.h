// The parameters of the kernels, in plain C++: no torch, no GPU. Letters as in fastattn/spec.py.
//
// Pointers are device pointers. Rows begin at multiples of 16 bytes and are multiples of 16 bytes long.
#pragma once

#include <cmath>
#include <cstdint>

#include "../dtype.h"
#include "../host_device.h"
#include "../mask.h"
#include "../philox.h"
#include "../softmax.h"

namespace fastattn::cuda {

// Rows [B, H, N] of a tensor [B, H, N, D] whose elements lie side by side in a row; strides in elements.
struct Rows {
  void* data;
  int64_t batch_stride, head_stride, row_stride;

  template <class Element>
  FASTATTN_HD Element* head(int64_t b, int64_t h) const {
    return static_cast<Element*>(data) + b * batch_stride + h * head_stride;
  }
};

// What rows in pages are of: elements as those of q, or the codes of numbers, a byte each.
enum class Stored { elements, int8, float8_e4m3fn };

// What the numbers of a row are to be multiplied by, [pages, H_kv, page_size].
struct Scales {
  const float* data;
  int64_t page_stride, head_stride, row_stride;
};

// Rows of keys or values in pages, [pages, H_kv, page_size, D] of any strides: key i of sample b is row i % page_size
// of page table[b, i / page_size].
struct PagedRows {
  Rows rows;  // the batch stride is that of pages
  int64_t column_stride;
  bool in_chunks;    // rows are of whole chunks: of 16 bytes, as all others, or of as many codes as those have elements
  const int* table;  // [B, n_k / page_size]; null: keys and values are not in pages
  int page_size, pages;
  Stored stored;
  Scales scales;  // of codes

  // Whatever the table says, it is one of the pages.
  FASTATTN_HD int64_t page(int64_t in_table) const { return clamp(table[in_table], 0, pages - 1); }

  FASTATTN_HD float scale(int64_t page, int64_t h, int64_t row) const {
    return scales.data[page * scales.page_stride + h * scales.head_stride + row * scales.row_stride];
  }
};

// A table broadcast to [B, H, n_q, n_k]: strides in entries, 0 where one entry serves all.
struct Table {
  const void* data;  // null: there is none
  int64_t batch_stride, head_stride, query_stride, key_stride;

  FASTATTN_HD int64_t index(int64_t b, int64_t h, int64_t query, int64_t key) const {
    return b * batch_stride + h * head_stride + query * query_stride + key * key_stride;
  }
};

// A summary of some neighbouring tokens of a sample: padding, and the ranges of their positions and documents.
struct Tokens {
  bool some_real, all_real;
  int64_t first_position, last_position;  // of those that are real
  int64_t first_document, last_document;  // the smallest and the largest number

  FASTATTN_HD static Tokens none() { return {false, true, kNoLimit, -kNoLimit, INT64_MAX, INT64_MIN}; }

  FASTATTN_HD void add(const Tokens& others) {
    some_real |= others.some_real;
    all_real &= others.all_real;
    first_position = lesser(first_position, others.first_position);
    last_position = greater(last_position, others.last_position);
    first_document = lesser(first_document, others.first_document);
    last_document = greater(last_document, others.last_document);
  }
};

constexpr int kTokenGroup = 32;    // tokens in a `Tokens` of `Side::groups`
constexpr int kLargestTile = 128;  // of queries or of keys

FASTATTN_HD int64_t tiles_of(int64_t n, int64_t rows) { return (n + rows - 1) / rows; }

// A number of tokens that fills whole tiles.
FASTATTN_HD int64_t padded(int n) { return tiles_of(n, kLargestTile) * kLargestTile; }

// The queries or the keys, [B, n]. Null: all are real; all are of one document; token i has the position i + the
// offset.
struct Side {
  int n;
  const bool* real;
  const int64_t* document;
  const int64_t* position;
  const int64_t* offsets;  // [B], or null: all samples have `offset`
  int64_t offset;
  Tokens* groups;  // [B, group_count()], or null where real, document and position are null

  // Those of whole tiles: tokens beyond n are padding.
  FASTATTN_HD int64_t group_count() const { return padded(n) / kTokenGroup; }

  FASTATTN_HD bool is_real(int64_t b, int64_t i) const { return i < n && (!real || real[b * n + i]); }

  FASTATTN_HD int64_t document_of(int64_t b, int64_t i) const { return document ? document[b * n + i] : 0; }

  FASTATTN_HD int64_t position_of(int64_t b, int64_t i) const {
    return position ? position[b * n + i] : fastattn::position_of(i, offsets ? offsets[b] : offset);
  }

  // The summary of the tokens first, ..., first + count - 1. Those beyond n are padding.
  FASTATTN_HD Tokens tokens(int64_t b, int64_t first, int64_t count) const {
    if (!groups) {
      const int64_t end = lesser(first + count, n);
      return {first < end, first + count <= n, position_of(b, first), position_of(b, end - 1), 0, 0};
    }
    Tokens result = Tokens::none();
    const Tokens* group = groups + b * group_count() + first / kTokenGroup;
#pragma unroll 1
    for (int i = 0; i * kTokenGroup < count; ++i) result.add(group[i]);
    return result;
  }
};

// How much of a tile of pairs is visible. In a full tile the real queries see every key; padding does not count.
enum class TileKind { skipped, partial, full };

FASTATTN_HD TileKind tile_kind(const Tokens& queries, const Tokens& keys, Band band) {
  const bool apart = queries.last_position + band.right < keys.first_position ||
                     queries.first_position - band.left > keys.last_position ||
                     queries.last_document < keys.first_document || queries.first_document > keys.last_document;
  if (!queries.some_real || !keys.some_real || apart) return TileKind::skipped;
  const bool one_document =
      queries.first_document == keys.last_document && queries.last_document == keys.first_document;
  const bool in_band = queries.first_position + band.right >= keys.last_position &&
                       queries.last_position - band.left <= keys.first_position;
  return keys.all_real && one_document && in_band ? TileKind::full : TileKind::partial;
}

struct Params {
  int B, H, H_kv, d_qk, d_v;
  DType dtype;
  Side queries, keys;
  Band band;
  Table dense;  // bool
  Table bias;
  DType bias_dtype;
  bool bias_by_distance;  // its entries are by the distance from query to key: query_stride is -key_stride
  float scale;
  float softcap;              // 0: scores are not bounded
  ScoreScale score_scale;     // split_scale(scale) of plain scores; general ones are in nats: {scale, log2(e)}
  const float* alibi_slopes;  // [B, H], or null
  const float* sinks;         // [H], or null
  Dropout dropout;            // with the key of `seed` instead of its own
  const int64_t* seed;
  Rows q, k, v;

  FASTATTN_HD int group() const { return H / H_kv; }

  // Whether scores are more than multiples of q.k, or weights more than powers of them, or pairs are hidden one by one.
  FASTATTN_HD bool is_general() const {
    return dense.data || bias.data || softcap > 0 || alibi_slopes || sinks || dropout.drops;
  }

  FASTATTN_HD float distance(int b, int query, int key) const {
    const int64_t behind = queries.position_of(b, query) - keys.position_of(b, key);
    return float(behind < 0 ? -behind : behind);
  }

  // The twin of Mask.keep in fastattn/spec.py, for real tokens.
  template <bool kGeneral>
  FASTATTN_HD bool sees(int b, int h, int query, int key) const {
    const int64_t behind = queries.position_of(b, query) - keys.position_of(b, key);
    if (behind > band.left || -behind > band.right) return false;
    if (queries.document_of(b, query) != keys.document_of(b, key)) return false;
    return !kGeneral || !dense.data || static_cast<const bool*>(dense.data)[dense.index(b, h, query, key)];
  }
};

// By which power of two weights are lowered, so that no sum of values overflows before it is divided: the sum of all
// weights is below 1, though those of a row of huge scores are up to 2^16 too large (factor_of_row). Sums of values of
// f16 do not overflow, while its weights have no exponents to spare.
struct Headroom {
  float log2, factor, one_over_factor;  // factor = 2^-log2

  static Headroom of(DType dtype, int n_keys) {
    const int bits = dtype == DType::f16 ? 0 : 16 + bits_of(n_keys);
    return {float(bits), std::ldexp(1.0f, -bits), std::ldexp(1.0f, bits)};
  }
};

// What the blocks of threads that take a part of the keys each leave of it, where there are several.
struct KeyParts {
  int count;         // 1: each block takes all keys
  int keys;          // of a part; a multiple of kLargestTile
  float *max, *sum;  // [count, B, H, n_q]; a sum of 0 where nothing of the part is seen: then o is not written
  float* o;          // [count, B, H, n_q, row_stride], still to be divided by the sum
  int64_t row_stride;
};

struct ForwardParams {
  Params params;
  Headroom headroom;
  Rows o;
  float* lse;                  // [B, H, n_q], in nats; -inf where nothing is seen
  PagedRows paged_k, paged_v;  // in the place of params.k and params.v, if they have a table
  KeyParts parts;              // of a call with few queries

  template <bool kInPages>
  FASTATTN_HD const auto& keys() const {
    if constexpr (kInPages) {
      return paged_k;
    } else {
      return params.k;
    }
  }

  template <bool kInPages>
  FASTATTN_HD const auto& values() const {
    if constexpr (kInPages) {
      return paged_v;
    } else {
      return params.v;
    }
  }
};

// What the backward kernels need of each query, in all of its pairs.
enum class RowStat {
  reference,  // with rest_log2, the Measure of ../softmax.h
  rest_log2,  // +inf where there is no query or it sees nothing, which makes each weight 0
  delta,      // sum(dO * O) - dlse
};
constexpr int kRowStats = 3;

// [B, H, kRowStats, padded n_q]
struct StatsOfQueries {
  float* data;
  int64_t stat_stride;

  FASTATTN_HD float* of_head(int64_t head, RowStat stat) const {
    return data + (head * kRowStats + int(stat)) * stat_stride;
  }
};

// Gradients that are null are not computed. dk and dv come together, and sums over keys with dq.
struct BackwardParams {
  Params params;
  Rows o, d_o;
  const float* lse;    // [B, H, n_q]
  const float* d_lse;  // [B, H, n_q], or null
  StatsOfQueries stats;
  Rows dq, dk, dv;
  float* ds_of_keys;  // [B, H, n_k]: dS summed over the queries
  // [B, H, n_q], each where it is not null: dS summed over the keys, dS times the distance, and P times the distance.
  float *ds_of_queries, *ds_by_distance, *p_by_distance;
  // dS summed over what shares an entry of the bias, dense: [bias_B, bias_H, n_q, n_k]; or for one by distance
  // [1, bias_H, diagonals of tiles, rows of a tile, columns of a tile], where the diagonals of tiles are summed up.
  float* d_bias;
  int bias_B, bias_H;
};

}  // namespace fastattn::cuda
