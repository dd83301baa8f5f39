// Philox4x32-10, and what dropout does with its words: the twin of philox and Spec.dropout_keep in fastattn/spec.py,
// for host and device.
//
// Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastattn {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;

struct PhiloxKey {
  uint32_t k0, k1;

  FASTATTN_HD PhiloxKey of_next_round() const { return {k0 + 0x9E3779B9, k1 + 0xBB67AE85}; }
};

struct PhiloxWords {
  uint32_t x0, x1, x2, x3;
};

FASTATTN_HD PhiloxKey philox_key(int64_t seed) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

// The words of a counter.
FASTATTN_HD PhiloxWords philox(PhiloxKey key, PhiloxWords x) {
  for (int round = 0; round < kPhiloxRounds; ++round, key = key.of_next_round()) {
    const uint64_t product0 = uint64_t(x.x0) * kPhiloxMultiplier0, product1 = uint64_t(x.x2) * kPhiloxMultiplier1;
    const uint32_t high0 = static_cast<uint32_t>(product0 >> 32), low0 = static_cast<uint32_t>(product0);
    const uint32_t high1 = static_cast<uint32_t>(product1 >> 32), low1 = static_cast<uint32_t>(product1);
    x = {high1 ^ x.x1 ^ key.k0, low1, high0 ^ x.x3 ^ key.k1, low0};
  }
  return x;
}

// `Spec.places`, where a call is a part of one that other processes compute too.
struct Places {
  const int32_t* data = nullptr;  // null: it is a call by itself
  int64_t n_q = 0;

  FASTATTN_HD uint32_t row(uint32_t i) const { return data ? data[2 + i] : i; }

  // That of the words of query i of head h, for the keys 4 j4, ..., 4 j4 + 3.
  FASTATTN_HD PhiloxWords counter(uint32_t b, uint32_t h, uint32_t i, uint32_t j4) const {
    if (!data) return {j4, i, h, b};
    return {static_cast<uint32_t>(data[2 + n_q + j4]), row(i), h + data[1], b + data[0]};
  }
};

// A weight is multiplied by 0 if its word is below `threshold`, else by `on_kept`. The word of query i and key j of
// query head h is number j % 4 of those of the counter (j / 4, i, h, b), or of that which `places` has instead.
struct Dropout {
  bool drops;  // false: the words need not be drawn
  PhiloxKey key;
  uint32_t threshold;
  float on_kept;
  Places places = {};
};

// p is a probability. For p = 1 the threshold 2^32 would not fit: every weight is kept then, times 0.
FASTATTN_HD Dropout make_dropout(double p, int64_t seed) {
  if (p == 1) return {true, philox_key(seed), 0, 0.0f};
  return {p > 0, philox_key(seed), static_cast<uint32_t>(p * 0x1p32), static_cast<float>(1 / (1 - p))};
}

}  // namespace fastattn
