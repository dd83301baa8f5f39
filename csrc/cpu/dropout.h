// What dropout multiplies a block of weights by: Philox4x32-10 (../philox.h) with one query in every lane.

namespace fastattn::FASTATTN_ISA {
namespace {

// As philox of ../philox.h, in the low halves of 64-bit lanes. What stands in the upper halves is never multiplied.
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

// visit(i, c, factors) for vector c of the queries and the key at place first + i of the list, of n keys: what dropout
// multiplies these weights by.
template <int C, class Visit>
FASTATTN_INLINE void each_dropout_factor(const Dropout& dropout, int64_t b, int64_t h, const QueryBlock<C>& queries,
                                         const IndexList& keys, int64_t first, int64_t n, Visit visit) {
  for (int64_t i = 0; i < n;) {
    const int64_t four_keys = keys.at(first + i) / 4;  // they share their counters
    Bits words[C][4];
    for (int c = 0; c < C; ++c) philox(dropout.key, four_keys, queries.index[c], h, b, words[c]);
    for (; i < n && keys.at(first + i) / 4 == four_keys; ++i) {
      for (int c = 0; c < C; ++c) {
        visit(i, c, words[c][keys.at(first + i) % 4] < dropout.threshold ? Floats{} : splat(dropout.on_kept));
      }
    }
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
