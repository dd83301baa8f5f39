// The parameters of the kernels, in plain C++: no torch, no instruction set. Letters as in fastattn/spec.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "../dtype.h"
#include "../mask.h"
#include "../philox.h"
#include "../softmax.h"
#include "index_list.h"

namespace fastattn {

// Rows [B, H, N] of a tensor [B, H, N, D] whose elements lie side by side in a row; or, of samples that are made of
// pages, those of a tensor [pages, H, page_rows, D], where row i of sample b is in page table[b, i / page_rows].
template <class Byte>
struct RowsOf {
  Byte* data;
  DType dtype;
  int64_t batch_stride, head_stride, row_stride;  // in elements
  const int32_t* table = nullptr;                 // [B, pages_of_sample], or null: samples are not made of pages
  int64_t pages_of_sample = 0, page_rows = 0;
  bool is_float8 = false;         // whether rows of 8 bits, DType::i8, are of float8_e4m3fn
  const float* scales = nullptr;  // of rows of 8 bits, which are to be multiplied by them: [B or pages, H, N]
  int64_t batch_stride_of_scales = 0, head_stride_of_scales = 0, row_stride_of_scales = 0;

  const float* scale(int64_t b, int64_t h, int64_t i) const {
    if (table) b = table[b * pages_of_sample + i / page_rows], i %= page_rows;
    return scales + b * batch_stride_of_scales + h * head_stride_of_scales + i * row_stride_of_scales;
  }

  Byte* row(int64_t b, int64_t h, int64_t i) const {
    if (table) b = table[b * pages_of_sample + i / page_rows], i %= page_rows;
    return data + bytes_of(dtype) * (b * batch_stride + h * head_stride + i * row_stride);
  }

  // Whether n rows of a list, from the place i on, are row_stride apart.
  bool in_steps(const IndexList& list, int64_t i, int64_t n) const {
    return list.consecutive(i, n) && (!table || list.at(i) / page_rows == list.at(i + n - 1) / page_rows);
  }
};
using Input = RowsOf<const char>;
using Output = RowsOf<char>;

// What hides keys inside a range: there each key has to be looked up.
enum Gaps : uint32_t { kNoGaps = 0, kOtherDocuments = 1, kDenseGaps = 2 };

struct RowRange {
  int32_t begin, end;
  uint32_t gaps;
};

constexpr int64_t kRangeGroup = 64;  // queries that share an entry of RangeTable::groups

// [B, H or 1, n_q]
struct RangeTable {
  const RowRange* data;    // null: ranges follow from positions alone
  const KeyRange* groups;  // [B, H or 1, groups of kRangeGroup queries]: from the first to the last key that they see
  int64_t batch_stride, head_stride;
  int64_t group_batch_stride, group_head_stride;
  uint32_t gaps;  // of all rows together

  const RowRange& at(int64_t b, int64_t h, int64_t query) const {
    return data[b * batch_stride + h * head_stride + query];
  }
  const KeyRange& group_of(int64_t b, int64_t h, int64_t query) const {
    return groups[b * group_batch_stride + h * group_head_stride + query / kRangeGroup];
  }
};

// Queries that follow each other and the only keys that they can see, such as a document: no other query of their
// sample sees one of these. Each run is cut into blocks of its own, so that no block has to hide other documents.
struct IsolatedRun {
  int64_t first, last;  // places in the list of real queries
  KeyRange keys;        // no others are visible to them
  bool see_all;         // each of them sees all of these
};

// The isolated runs of a sample, in the order of their queries.
struct IsolatedRunList {
  const IsolatedRun* data;
  int64_t count;
};

// The number of each token's document, and the token's position in it: [B, n].
struct Documents {
  const int32_t *of_query, *of_key;  // null: there are none; -1: padding
  const int32_t *rank_of_query, *rank_of_key;
};

// A table broadcast to [B, H, n_q, n_k]: strides in bytes, 0 where one entry serves all.
struct Table {
  const char* data;  // null: there is none
  int64_t batch_stride, head_stride, query_stride;
  bool one_for_all_keys;  // else the entries of a row lie side by side

  // The same for n_q queries that share one row, of entries by the distance from query to key: that of the last query
  // begins where the row does, and that of each other one an entry after that of the next.
  Table by_distance(int64_t n_q, int64_t bytes) const {
    return {data + (n_q - 1) * bytes, batch_stride, head_stride, -bytes, false};
  }
  bool is_by_distance() const { return query_stride < 0; }

  const char* row(int64_t b, int64_t h, int64_t query) const {
    return data + b * batch_stride + h * head_stride + query * query_stride;
  }
};

// The tiles of a bool mask with gaps, of kMaskTile queries and keys each: [B or 1, H or 1, n_q or 1 in tiles, n_k in
// tiles], with strides in tiles, 0 where one serves all. (The tiles of products, in matrix.h, are others.)
enum MaskTile : uint8_t { kSkipped = 0, kPartial = 1, kFull = 3 };
constexpr int64_t kMaskTile = 16;

struct MaskTiles {
  const uint8_t* data;  // null: there are no gaps of that kind
  int64_t batch_stride, head_stride, query_stride;
  bool many_skipped;  // more than a quarter

  // What the tiles are together that hold these queries and keys, from the first to the last.
  MaskTile joint(int64_t b, int64_t h, int64_t first_query, int64_t last_query, int64_t first_key,
                 int64_t last_key) const {
    unsigned some = kSkipped, all = kFull;
    const uint8_t* const of_head = data + b * batch_stride + h * head_stride;
    for (int64_t i = first_query / kMaskTile; i <= last_query / kMaskTile; ++i) {
      for (int64_t j = first_key / kMaskTile; j <= last_key / kMaskTile; ++j) {
        const uint8_t tile = of_head[i * query_stride + j];
        some |= tile, all &= tile;
      }
    }
    return all == kFull ? kFull : some ? kPartial : kSkipped;
  }
};

struct Params {
  int64_t B, H, H_kv, n_q, n_k, d_qk, d_v;
  double scale;
  Band band;
  const int64_t* q_offset;   // [B], or [B, n_q]
  bool per_query_offset;     // whether it is [B, n_q]
  const IndexList* queries;  // [B], the real ones
  const IndexList* keys;     // [B], the real ones
  Input q, k, v;
  Dropout dropout;
  RangeTable ranges;
  const IsolatedRunList* isolated_runs;  // [B], or null: the queries of a sample are one run
  Documents documents;
  Table dense;           // bool
  MaskTiles mask_tiles;  // of it
  Table bias;
  DType bias_dtype;
  const float* alibi_slopes;  // [B, H], or null
  double softcap;             // 0: scores are not bounded; else from kLeastSoftcap to kMostSoftcap
  const float* sinks;         // [H], or null

  int64_t group() const { return H / H_kv; }

  int64_t position(int64_t b, int64_t query) const {
    const int64_t rank = documents.rank_of_query ? documents.rank_of_query[b * n_q + query] : query;
    return position_of(rank, q_offset[per_query_offset ? b * n_q + query : b]);
  }

  // From the first to the last visible key; some in between may be hidden.
  KeyRange visible(int64_t b, int64_t h, int64_t query) const {
    if (!ranges.data) return visible_keys(band, position(b, query), n_k);
    return {ranges.at(b, h, query).begin, ranges.at(b, h, query).end};
  }

  uint32_t gaps(int64_t b, int64_t h, int64_t query) const {
    return ranges.gaps ? ranges.at(b, h, query).gaps : kNoGaps;
  }

  // Whether one of these gaps hides a key that is inside the range of the query.
  bool in_gap(uint32_t gaps, int64_t b, int64_t h, int64_t query, int64_t key) const {
    return (gaps & kDenseGaps && !dense.row(b, h, query)[key]) ||
           (gaps & kOtherDocuments && documents.of_query[b * n_q + query] != documents.of_key[b * n_k + key]);
  }

  // From the first to the last key that is visible to some of the queries first, ..., last.
  KeyRange visible_to_some(int64_t b, int64_t h, int64_t first, int64_t last) const {
    if (!ranges.data) return hull(visible(b, h, first), visible(b, h, last));
    KeyRange keys{n_k, 0};
    for (int64_t i = first / kRangeGroup; i <= last / kRangeGroup; ++i) {
      keys = hull(keys, ranges.group_of(b, h, i * kRangeGroup));
    }
    return keys;
  }

  // Whether scores are more than a multiple of the products of queries and keys. S is then in nats.
  bool finishes_scores() const { return softcap > 0 || bias.data || alibi_slopes; }

  // S as the exponent takes it is score * scores_per_nat(), and score_log2 is S * on_score_log2().
  float on_score_log2() const {
    return finishes_scores() ? static_cast<float>(kLog2E) : split_scale(scale).on_score_log2;
  }
  double scores_per_nat() const { return finishes_scores() ? 1.0 : kLog2E / on_score_log2(); }
};

struct ForwardOutputs {
  Output o;
  float* lse;                   // [B, H, n_q]
  Measure* measures = nullptr;  // of the real queries, or null
};

// Queries of one head, numbered first_query, ..., last_query - 1. It owns the blocks of real queries that begin there,
// and the rows of padding.
struct ForwardItem {
  int64_t b, h, first_query, last_query;
};

// A few queries of the heads that share keys and values, against a part of the key list: part `part` of n_parts, which
// are numbered from first_part on among those of all heads.
struct DecodeItem {
  int64_t b, h_kv, first_part, part, n_parts;
  int64_t first_key, last_key;
  bool is_begun = false;  // whether the thread has prefetched the first rows, as `next` of the item before
};
constexpr int64_t kDecodeRows = 128;  // most rows, of all heads together

// [B or 1, heads, n_q, n_k]: over all samples or none, whose stride is then 0, and over the heads with the same
// remainder by `heads`. Or [B, H, 2, n_q + n_k - 1], as a Table by distance: an entry gets a number from each query, so
// what rounding takes from its sum is summed up too, `lost` elements further.
struct BiasSums {
  float* data;
  int64_t batch_stride, heads, head_stride, query_stride;
  int64_t lost = 0;

  float* row(int64_t b, int64_t h, int64_t query) const {
    return data + b * batch_stride + h % heads * head_stride + query * query_stride;
  }
  BiasSums by_distance(int64_t n_q) const {
    return {data + n_q - 1, batch_stride, heads, head_stride, -1, head_stride / 2};
  }
  bool is_by_distance() const { return query_stride < 0; }
};

// A Measure that threads read and write as one.
struct alignas(8) SharedMeasure {
  Measure value;
};

struct BackwardTensors {
  Input o, d_o;        // d_o.data may be null: zeros
  const float* lse;    // [B, H, n_q]
  const float* d_lse;  // [B, H, n_q], or null: zeros
  // What arrives at the weights after dropout, or none: a part of dP. Its part of delta, which is no sum over O, is
  // found first: rowsum(P * dP) [B, H, n_q].
  Table d_weights;
  DType d_weights_dtype;
  float* delta_of_weights;
  // [B, H, n_q], or null: zeros, and once an item has found one that lse is too rough for, that.
  SharedMeasure* measures;
  Output dq, dk, dv;  // dq is fp32: it is summed in place over the chunks of keys
  // Sums of dS, for what is added to the scores. The kernels add to them; they are null where they are not wanted.
  BiasSums d_bias;
  float* d_column;  // [B, H, n_k]: over the queries
  float* d_row;     // [B, H, n_q]: over the keys
  float* d_slope;   // [B, H, n_q]: over the keys, times their distances
};

struct Wanted {
  bool dq, dkv;
  bool by_query;  // d_bias, d_row and d_slope, which have rows for queries as dq has
  bool by_key;    // d_column, which has entries for keys as dk and dv have

  bool rows_of_queries() const { return dq || by_query; }
  bool rows_of_keys() const { return dkv || by_key; }

  static Wanted in(const BackwardTensors& t) {
    return {t.dq.data != nullptr, t.dk.data || t.dv.data, t.d_bias.data || t.d_row || t.d_slope, t.d_column != nullptr};
  }
};

// The heads that share keys and values, queries numbered first_query, ..., last_query - 1, and a part of the key list.
// An item owns what it writes: rows of the blocks of queries that begin there if it wants those (its keys are then all
// that they see), rows of those keys if it wants those (its queries are then all that see them). One that wants both
// has whole isolated runs.
struct BackwardItem {
  int64_t b, h_kv, first_head, last_head;
  int64_t first_query, last_query;
  int64_t first_key, last_key;
  Wanted wanted;
};

struct DecodeKernels {
  int64_t (*parts_size)(const Params&);  // floats for each part of the heads that share keys
  int64_t (*scratch)(const Params&);
  void (*attend)(const Params&, const DecodeItem&, DecodeItem* next, float* parts, float* scratch);
  void (*combine)(const Params&, const ForwardOutputs&, const DecodeItem& of_head, float* parts);
  float (*quantize)(DType dtype, const char* row, int64_t d, bool is_float8, int8_t* to);
};

// Queries at the places first_query, ... of the list of real ones, and the rows of padding with these numbers, of some
// heads whose weights go to row `row_of_heads` of the output; or one head and all of its queries, and a chunk of keys.
struct WeightsItem {
  int64_t b, first_head, last_head, row_of_heads;
  int64_t first_query, last_query;
  int64_t first_key;
};

struct TopKeysOutputs {
  float* weights;  // [B, H, n_q, top_k]
  int64_t* keys;
  int64_t top_k;
};

struct WeightsKernels {
  int64_t chunk_keys;  // of an item of `received`
  void (*measure)(const Params&, const float* lse, const WeightsItem&, Measure*, float* scratch);  // as `backward`
  int64_t (*scratch)(const Params&, int64_t top_k);                                                // of the three below
  void (*weights)(const Params&, const Measure*, const Output&, const WeightsItem&, float* scratch);
  void (*received)(const Params&, const Measure*, float* out, const WeightsItem&, float* scratch);
  void (*top_keys)(const Params&, const Measure*, const TopKeysOutputs&, const WeightsItem&, float* scratch);
  int64_t (*joint_scratch)(const Params&);  // of the one below, or 0 where the call is none for it
  void (*attend)(const Params&, const ForwardOutputs&, const Output& weights, const WeightsItem&, float* scratch);
};

// The kernels compiled for one instruction set. Scratch is counted in floats, per thread, 64-byte aligned. `next` is
// the item that the thread takes after this one, or null.
struct Kernels {
  const char* name;
  int64_t block_queries;  // queries that share a pass over the keys
  int64_t strip_queries;  // most queries of a ForwardItem
  int64_t block_keys;     // keys that are worth an item: a multiple of this
  int64_t (*forward_scratch)(const Params&);
  void (*forward)(const Params&, const ForwardOutputs&, const ForwardItem&, const ForwardItem* next, float* scratch);
  int64_t (*backward_scratch)(const Params&);
  void (*backward)(const Params&, const BackwardTensors&, const BackwardItem&, const BackwardItem* next,
                   float* scratch);
  float (*fma_chains)(int64_t steps);
  int64_t chain_operations;  // of one step of fma_chains
  const WeightsKernels* weights;
  const DecodeKernels* decode;
};

}  // namespace fastattn
