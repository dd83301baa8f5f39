// Which keys a query may see by position: the twin of Mask.keep in fastattn/spec.py, for host and device.
//
// Padding is not in here: it is a list of rows that are never visited (cpu/index_list.h).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastattn {

// Positions and windows are exact up to kFar, and a window of kNoLimit hides nothing from there; no sum overflows.
constexpr int64_t kFar = int64_t(1) << 61;
constexpr int64_t kNoLimit = 2 * kFar;

FASTATTN_HD int64_t lesser(int64_t x, int64_t y) { return x < y ? x : y; }
FASTATTN_HD int64_t greater(int64_t x, int64_t y) { return x < y ? y : x; }
FASTATTN_HD int64_t clamp(int64_t x, int64_t low, int64_t high) { return greater(low, lesser(x, high)); }

// Keys begin, begin + 1, ..., end - 1.
struct KeyRange {
  int64_t begin, end;

  FASTATTN_HD bool empty() const { return begin >= end; }
  FASTATTN_HD bool covers(int64_t n_k) const { return begin == 0 && end == n_k; }
  FASTATTN_HD bool contains(int64_t key) const { return begin <= key && key < end; }
  FASTATTN_HD bool meets(KeyRange other) const { return greater(begin, other.begin) < lesser(end, other.end); }
};

// A query at position x sees the keys x - left, ..., x + right.
struct Band {
  int64_t left, right;
};

FASTATTN_HD Band make_band(bool causal, int64_t left, int64_t right) {
  return {clamp(left, -kFar, kNoLimit), clamp(causal ? lesser(right, 0) : right, -kFar, kNoLimit)};
}

FASTATTN_HD int64_t position_of(int64_t query, int64_t q_offset) { return query + clamp(q_offset, -kFar, kFar); }

FASTATTN_HD KeyRange visible_keys(Band band, int64_t position, int64_t n_k) {
  const int64_t begin = clamp(position - band.left, 0, n_k);
  const int64_t end = clamp(position + band.right + 1, 0, n_k);
  return {begin, greater(begin, end)};
}

// From the first to the last key of both.
FASTATTN_HD KeyRange hull(KeyRange x, KeyRange y) {
  return x.empty() ? y : y.empty() ? x : KeyRange{lesser(x.begin, y.begin), greater(x.end, y.end)};
}

// The keys that the queries of a block see.
struct BlockRange {
  KeyRange some;  // keys that some query of the block may see: the rest is never loaded
  KeyRange all;   // keys that every query sees: they need no mask

  FASTATTN_HD void add(KeyRange keys) {
    some = hull(some, keys);
    all = {greater(all.begin, keys.begin), lesser(all.end, keys.end)};
  }
  FASTATTN_HD void add(const BlockRange& others) {
    some = hull(some, others.some);
    all = {greater(all.begin, others.all.begin), lesser(all.end, others.all.end)};
  }
};

FASTATTN_HD BlockRange no_queries(int64_t n_k) { return {{n_k, 0}, {0, n_k}}; }

}  // namespace fastattn
