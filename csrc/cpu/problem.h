// What the kernels are told, in plain C++: no torch, no instruction set. Letters as in fastattn/spec.py.
#pragma once

#include <cstdint>

#include "../mask.h"
#include "../philox.h"
#include "index_list.h"

namespace fastattn {

enum class DType { f32, bf16, f16 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Rows [B, H, N] of a tensor [B, H, N, D] whose elements lie side by side in a row.
template <class Byte>
struct RowsOf {
  Byte* data;
  DType dtype;
  int64_t batch_stride, head_stride, row_stride;  // in elements

  Byte* row(int64_t b, int64_t h, int64_t i) const {
    return data + bytes_of(dtype) * (b * batch_stride + h * head_stride + i * row_stride);
  }
};
using Input = RowsOf<const char>;
using Output = RowsOf<char>;

struct Problem {
  int64_t B, H, H_kv, n_q, n_k, d_qk, d_v;
  double scale;
  Band band;
  const int64_t* q_start;    // [B]
  const IndexList* queries;  // [B], the real ones
  const IndexList* keys;     // [B], the real ones
  Input q, k, v;
  Dropout dropout;

  int64_t group() const { return H / H_kv; }

  KeyRange visible(int64_t b, int64_t query) const {
    return visible_keys(band, position_of(query, q_start[b]), n_k);
  }
};

struct ForwardOutputs {
  Output o;
  float* lse;  // [B, H, n_q]
};

// Queries of one head at the places first_query, ... of the list of real ones: at most Kernels::strip_queries of them,
// from a multiple of Kernels::block_queries on. It owns the rows with these numbers, of real queries and of padding.
struct ForwardItem {
  int64_t b, h, first_query, last_query;
};

// A few queries of the heads that share keys and values, against a part of the key list: part `part` of n_parts.
struct DecodeItem {
  int64_t b, h_kv, part, n_parts;
  int64_t first_key, last_key;
};
constexpr int64_t kDecodeRows = 8;  // most rows, of all heads together: more are faster as lanes

struct BackwardTensors {
  Input o, d_o;        // d_o.data may be null: zeros
  const float* lse;    // [B, H, n_q]
  const float* d_lse;  // [B, H, n_q], or null: zeros
  Output dq, dk, dv;   // dq is fp32: it is summed in place over the chunks of keys
};

// The heads that share keys and values, their queries in `queries`, and the part of the key list in `keys`. An item
// owns what it writes: dq of those queries if it wants dq (its keys are then all keys), dk and dv of those keys if it
// wants those (its queries are then all queries).
struct BackwardItem {
  int64_t b, h_kv, first_head, last_head;
  int64_t first_query, last_query;
  int64_t first_key, last_key;
  bool wants_dq, wants_dkv;
};

struct DecodeKernels {
  int64_t (*parts_size)(const Problem&);  // floats for each part of the heads that share keys
  int64_t (*scratch)(const Problem&);
  void (*attend)(const Problem&, const DecodeItem&, float* parts, float* scratch);
  void (*combine)(const Problem&, const ForwardOutputs&, int64_t b, int64_t h_kv, int64_t n_parts, float* parts);
};

// The kernels compiled for one instruction set. Scratch is counted in floats, per thread, 64-byte aligned.
struct Kernels {
  const char* name;
  int64_t block_queries;  // queries that share a pass over the keys
  int64_t strip_queries;  // most queries of a ForwardItem
  int64_t block_keys;     // keys that are worth an item: a multiple of this
  int64_t (*forward_scratch)(const Problem&);
  void (*forward)(const Problem&, const ForwardOutputs&, const ForwardItem&, float* scratch);
  int64_t (*backward_scratch)(const Problem&);
  void (*backward)(const Problem&, const BackwardTensors&, const BackwardItem&, float* scratch);
  float (*fma_chains)(int64_t steps);
  int64_t chain_operations;  // of one step of fma_chains
  const DecodeKernels* decode;  // null where those of another instruction set do it
};

}  // namespace fastattn
