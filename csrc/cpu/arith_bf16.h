// Arithmetic in bf16 with sums in fp32: a unit is two elements that follow each other in the direction of the sum, and
// one instruction adds both products.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <utility>

#include "matrix.h"
#include "params.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int kPerUnit = 2;
#if FASTATTN_TILES
constexpr int kGrain = 32;  // a tile is 16 units long: what it takes beyond the end must be zeros
constexpr int kFewestColumns = 2;
#elif defined(__aarch64__)
constexpr int kGrain = 4;  // bfmmla takes two units of a row
constexpr int kFewestColumns = 1;
#else
constexpr int kGrain = 2;
constexpr int kFewestColumns = 1;
#endif

constexpr int64_t units(int64_t d) { return (d + 2 * kLanes - 1) / (2 * kLanes) * kLanes; }
constexpr int64_t steps_over(int64_t d) { return (d + kGrain - 1) / kGrain * (kGrain / 2); }

FASTATTN_INLINE Floats multiply_add(Floats x, Floats y, Floats sum) {
#if defined(__aarch64__)
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)y);
#else
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#endif
}

FASTATTN_INLINE void read_units(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t i, int64_t n,
                                int64_t d, float* to) {
  for (int64_t j = 0; j < n; ++j, to += units(d)) {
    __builtin_memset(to, 0, units(d) * sizeof(float));
    if (d > 0) __builtin_memcpy(to, x.row(b, h, list.at(i + j)), d * sizeof(BFloat16));  // a null pointer else
  }
}

typedef uint16_t Elements __attribute__((vector_size(kLanes * 4)));
typedef uint16_t ElementsInMemory __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));

template <class Use>
FASTATTN_INLINE void with_rows_of_units(const Input& x, Use use) {
  use(reinterpret_cast<const BFloat16*>(x.data));
}
FASTATTN_INLINE Floats load_units(const BFloat16* p) { return (Floats) * reinterpret_cast<const ElementsInMemory*>(p); }

#if defined(__aarch64__)
constexpr bool reads_some_units(DType) { return false; }
#else
constexpr bool reads_some_units(DType dtype) { return dtype == DType::bf16; }
FASTATTN_INLINE Floats load_some_units(const BFloat16* p, int64_t n) {
  return (Floats)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << lesser(n, 2 * kLanes)) - 1), p);
}
#endif

// The elements of half of the lanes of two vectors, in pairs.
template <int kHalf, int... J>
FASTATTN_INLINE Floats interleaved(Floats first, Floats second, std::integer_sequence<int, J...>) {
#if defined(__clang__)
  return (Floats)__builtin_shufflevector((Elements)first, (Elements)second,
                                         (kHalf * kLanes + J / 2 + J % 2 * 2 * kLanes)...);
#else
  return (Floats)__builtin_shuffle((Elements)first, (Elements)second,
                                   Elements{(kHalf * kLanes + J / 2 + J % 2 * 2 * kLanes)...});
#endif
}

template <class Row>
FASTATTN_INLINE Floats across_rows(Row row, int64_t k, int64_t c) {
  using Places = std::make_integer_sequence<int, 2 * kLanes>;
  const Floats first = row(2 * k, c / 2), second = row(2 * k + 1, c / 2);
  return c % 2 == 0 ? interleaved<0>(first, second, Places{}) : interleaved<1>(first, second, Places{});
}

FASTATTN_INLINE Floats times_on_query(Floats units, float on_query) {
  const uint32_t sign = on_query < 0 ? 0x80008000 : 0;
  return on_query == 0 ? Floats{} : (Floats)((Bits)units ^ sign);
}

FASTATTN_INLINE bool are_units(const Input& x, int64_t d) {
  return d % kGrain == 0 && reinterpret_cast<uintptr_t>(x.data) % sizeof(float) == 0 &&
         (x.batch_stride | x.head_stride | x.row_stride) % 2 == 0;
}

// Elements i, ..., i + kLanes - 1 of two rows of d, zeros after the end; or two vectors of floats, rounded to nearest
// even. The second ones are in the upper halves.
#if defined(__aarch64__)

FASTATTN_INLINE Floats paired(const float* first_row, const float* second_row, int64_t i, int64_t d) {
  const auto upper_halves = [&](const float* row) {
    return (Bits)widen_lanes(reinterpret_cast<const BFloat16*>(row) + i, d - i);
  };
  return (Floats)(upper_halves(first_row) >> 16 | upper_halves(second_row));
}

FASTATTN_INLINE Floats paired(Floats low, Floats high) {
  const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
  const uint16x8_t bits = vreinterpretq_u16_bf16(both);
  return (Floats)vzip1q_u16(bits, vextq_u16(bits, bits, 4));
}

#else

FASTATTN_INLINE Floats paired(const float* first_row, const float* second_row, int64_t i, int64_t d) {
  const __mmask16 inside = d - i < kLanes ? (1 << (d - i)) - 1 : 0xffff;
  const auto elements = [&](const float* row) {
    const auto* from = reinterpret_cast<const uint16_t*>(row) + i;
    return (Bits)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, from));
  };
  return (Floats)(elements(first_row) | elements(second_row) << 16);
}

FASTATTN_INLINE Floats paired(Floats low, Floats high) {
  constexpr auto from = [](int i) { return i % 2 * 16 + i / 2; };
  alignas(64) static constexpr uint16_t kInterleaved[32] = {
      from(0),  from(1),  from(2),  from(3),  from(4),  from(5),  from(6),  from(7),  from(8),  from(9),  from(10),
      from(11), from(12), from(13), from(14), from(15), from(16), from(17), from(18), from(19), from(20), from(21),
      from(22), from(23), from(24), from(25), from(26), from(27), from(28), from(29), from(30), from(31)};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (Floats)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), both);
}

#endif

using Transposed = Rows;
FASTATTN_INLINE Transposed transposed(Rows rows, int64_t n, int64_t d, float* copy) {
  const int64_t steps = n / 2;
  for (int64_t j = 0; j < steps; j += kLanes) {
    for (int64_t i = 0; i < padded(d); i += kLanes) {
      Floats tile[kLanes] = {};
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        const float* pair_of_rows = rows.data + 2 * (j + r) * rows.stride;
        if (j + r < steps) tile[r] = paired(pair_of_rows, pair_of_rows + rows.stride, i, d);
      }
      transpose(tile);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) store(copy + (i + r) * padded(steps) + j, tile[r]);
    }
  }
  return {copy, padded(steps)};
}
constexpr int64_t transposed_size(int64_t n, int64_t d) { return padded(d) * padded(n / 2); }

FASTATTN_INLINE Right over_queries(Rows rows, int64_t M, int64_t d, float* copy) {
  for (int64_t i = 0; i < M; i += 2) {
    const float* pair_of_rows = rows.data + i * rows.stride;
    for (int64_t j = 0; j < padded(d); j += kLanes) {
      store(copy + i / 2 * padded(d) + j, paired(pair_of_rows, pair_of_rows + rows.stride, j, d));
    }
  }
  return {copy, padded(d)};
}
constexpr int64_t over_queries_size(int64_t M, int64_t d) { return M / 2 * padded(d); }
FASTATTN_INLINE int64_t query_steps(int64_t n, int64_t M) { return kGrain == 32 ? M / 2 : steps_over(n); }

// Two forms: pairs along a row in a left factor, pairs of rows in a right one.
constexpr bool kOneForm = false;
using LeftElement = BFloat16;

template <int C>
FASTATTN_INLINE void store_right(float* to, int64_t i, const Floats (&x)[kPerUnit][C]) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) store(to + (i / 2 * C + c) * kLanes, paired(x[0][c], x[1][c]));
}
template <int C>
FASTATTN_INLINE void store_left(float* to, int64_t i, const Floats (&x)[kPerUnit][C]) {
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) narrow(reinterpret_cast<BFloat16*>(to) + ((i + r) * C + c) * kLanes, x[r][c]);
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
