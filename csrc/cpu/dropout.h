// What dropout multiplies a block of weights by: Philox4x32-10 (../philox.h) with one query in every lane.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "params.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// As philox of ../philox.h, in the low halves of 64-bit lanes. The upper halves are never multiplied.
FASTATTN_INLINE void philox(PhiloxKey key, Wide (&x)[4]) {
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round, key = key.of_next_round()) {
    const Wide product0 = product_of_low_halves(x[0], kPhiloxMultiplier0);
    const Wide product1 = product_of_low_halves(x[2], kPhiloxMultiplier1);
    x[0] = (product1 >> 32) ^ x[1] ^ key.k0;
    x[1] = product1;
    x[2] = (product0 >> 32) ^ x[3] ^ key.k1;
    x[3] = product0;
  }
}

// The words of the counters (x0, lane of x1, x2, x3).
FASTATTN_INLINE void philox(PhiloxKey key, uint64_t x0, Bits x1, uint64_t x2, uint64_t x3, Bits (&words)[4]) {
  const Wide zero = {};
  Wide even[4] = {zero + x0, (Wide)x1, zero + x2, zero + x3};
  Wide odd[4] = {zero + x0, (Wide)x1 >> 32, zero + x2, zero + x3};
  philox(key, even);
  philox(key, odd);
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) words[word] = (Bits)((even[word] & 0xffffffff) | odd[word] << 32);
}

// Writes Z^T [part.n, C * kLanes]: what dropout multiplies the weights of a part of the keys by.
FASTATTN_ONCE void dropout_factors(int C, const Dropout& dropout, int64_t b, int64_t h, const QueryBlock& queries,
                                   const KeyBlock& keys, Part part, float* z_t) {
  const int64_t end = lesser(part.begin + part.n, keys.n);
  Bits rows[kColumns];
  for (int c = 0; c < C; ++c) {
    rows[c] = queries.index[c];
    if (!dropout.places.data) continue;
    for (int lane = 0; lane < kLanes; ++lane) rows[c][lane] = dropout.places.row(rows[c][lane]);
  }
  for (int64_t i = part.begin; i < end;) {
    const int64_t four_keys = keys.key(i) / 4;  // they share their counters
    const PhiloxWords counter = dropout.places.counter(b, h, 0, four_keys);
    Bits words[kColumns][4];
    for (int c = 0; c < C; ++c) philox(dropout.key, counter.x0, rows[c], counter.x2, counter.x3, words[c]);
    for (; i < end && keys.key(i) / 4 == four_keys; ++i) {
      for (int c = 0; c < C; ++c) {
        const Bits word = words[c][keys.key(i) % 4];
        const Floats factors = word < dropout.threshold ? Floats{} : splat(dropout.on_kept);
        store(z_t + ((i - part.begin) * C + c) * kLanes, factors);
      }
    }
  }
  // Beyond the end the weights are zeros, and what multiplies them must be a number.
  const int64_t written = greater(end - part.begin, 0);
  __builtin_memset(z_t + written * C * kLanes, 0, (part.n - written) * C * kLanes * sizeof(float));
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
