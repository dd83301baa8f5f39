// Vectors of kLanes floats in GCC's vector extensions: the same source for every instruction set.
//
// Included by each instruction set's translation unit, for its target (kernels.h). Everything is in an anonymous
// namespace, since the linker may merge equal inline functions and must not pick one that the machine cannot run.
#pragma once

#include <cstdint>
#include <utility>

#if FASTATTN_LANES > 4
#include <immintrin.h>
#endif

#include "../softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

#define FASTATTN_INLINE __attribute__((always_inline)) inline

// A function of which there is one copy, since compiling several takes long: beside what it does a call costs nothing.
#if defined(__clang__)
#define FASTATTN_ONCE __attribute__((noinline))
#else
#define FASTATTN_ONCE __attribute__((noinline, noclone))
#endif

constexpr int kLanes = FASTATTN_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Wide __attribute__((vector_size(kLanes * 4)));  // half as many lanes
typedef float FloatsInMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

FASTATTN_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsInMemory*>(p); }
FASTATTN_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsInMemory*>(p) = x; }
FASTATTN_INLINE Floats splat(float x) { return x - Floats{}; }

// 0, 1, ..., kLanes - 1
FASTATTN_INLINE Ints numbers_of_lanes() {
  Ints result{};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = lane;
  return result;
}

// NaN in x is ignored by the maximum and kept by the minimum, whose limit is no NaN.
FASTATTN_INLINE Floats larger(Floats x, Floats than) { return x > than ? x : than; }
FASTATTN_INLINE Floats at_most(Floats x, float limit) { return x > limit ? splat(limit) : x; }

FASTATTN_INLINE float largest_lane(Floats x) {
  float result = x[0];
  for (int lane = 1; lane < kLanes; ++lane) result = x[lane] > result ? x[lane] : result;
  return result;
}

FASTATTN_INLINE bool any(Ints x) {
#if FASTATTN_LANES == 16
  return _mm512_movepi32_mask((__m512i)x) != 0;
#else
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= x[lane];
  return result != 0;
#endif
}

// Whether y is one of x[0], ..., x[n - 1].
FASTATTN_INLINE bool holds(const float* x, int64_t n, float y) {
  Ints result = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) result |= load(x + i) == y;
  bool in_the_rest = false;
  for (; i < n; ++i) in_the_rest |= x[i] == y;
  return in_the_rest || any(result);
}

// A polynomial by its coefficients, the highest power first.
template <int N>
FASTATTN_INLINE Floats polynomial(const float (&coefficients)[N], Floats x) {
  Floats y = splat(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) y = y * x + coefficients[i];
  return y;
}

// exp2 is 2^(x - n) for x <= 127 and a whole n >= 0, exactly 2^-n at 0, 0 below the normal numbers, NaN for NaN; as
// exact as 2^x, since n is subtracted from the exponent. An even n changes no other bit. The polynomials are minimax
// for the relative error of 2^f, up to 2e-9 (8e-8 once evaluated in fp32). One degree less would be off by 8e-8 always
// to the same side at f = 0, which the error budget would notice; where weights are rounded to bf16, 9e-5 serves.
#if FASTATTN_LANES == 16

FASTATTN_INLINE Floats exp2(Floats x, float n = 0) {
#if FASTATTN_BF16
  constexpr float kCoefficients[] = {7.706704400e-02f, 2.276449877e-01f, 6.951167878e-01f, 1.0f};
  constexpr int kFloorQuietly = 9;
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, kFloorQuietly);  // x - floor(x)
#else
  constexpr float kCoefficients[] = {
      1.535336182e-04f, 1.339887445e-03f, 9.618437358e-03f, 5.550332471e-02f, 2.402264791e-01f, 6.931472029e-01f, 1.0f};
  constexpr int kNearestQuietly = 8;
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, kNearestQuietly);  // small around 0: no rounding errors there
#endif
  const Floats y = polynomial(kCoefficients, f), power = x - f - n;
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(n - 126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)y, (__m512)power);
}

#else

// x = i + f, where i is the nearest integer: adding x to a number whose last place is 1 leaves i - n + 127, the biased
// exponent of 2^(i - n), in the low bits.
FASTATTN_INLINE Floats exp2(Floats x, float n = 0) {
#if FASTATTN_BF16
  constexpr float kCoefficients[] = {5.500893000e-02f, 2.422109600e-01f, 6.932829300e-01f, 1.0f};
#else
  constexpr float kCoefficients[] = {
      1.534581243e-04f, 1.339993090e-03f, 9.618489072e-03f, 5.550328642e-02f, 2.402264625e-01f, 6.931471825e-01f, 1.0f};
#endif
  const float shifter = 12582912.0f + 127.0f - n;  // 1.5 * 2^23, and the bias of the exponent
  const Floats shifted = x + shifter;
  const Floats f = x - (shifted - shifter);
  const Floats power = (Floats)((Bits)shifted << 23);
  return x < n - 126.0f ? Floats{} : polynomial(kCoefficients, f) * power;
}

#endif

// log2(x) for x >= 0 that is 0 or normal, to about 1e-7; infinite and NaN as they should be. x = 2^e * (1 + t) with
// 1 + t about 1, and log(1 + t) = 2 artanh(s) for s = t / (2 + t).
FASTATTN_INLINE Floats log2(Floats x) {
  constexpr float kTwoLog2E = 2.885390082f;
  constexpr float kSeries[] = {kTwoLog2E / 9, kTwoLog2E / 7, kTwoLog2E / 5, kTwoLog2E / 3, kTwoLog2E};
  constexpr int32_t kSquareRootOfHalf = 0x3f3504f3;
  const Ints exponent = ((Ints)x - kSquareRootOfHalf) >> 23;
  const Floats t = (Floats)((Ints)x - (exponent << 23)) - 1.0f;
  const Floats s = t / (t + 2.0f);
  const Floats y = s * polynomial(kSeries, s * s) + __builtin_convertvector(exponent, Floats);
  return x > 0.0f && x < kInfinity ? y : x == 0.0f ? splat(-kInfinity) : x;
}

// tanh(x) and its derivative, with small relative errors both (2e-7, or what exp2 makes of that): near 0 a minimax
// polynomial, and the derivative without the difference 1 - tanh^2.
struct Tanh {
  Floats value, derivative;
};

FASTATTN_INLINE Tanh tanh(Floats x) {
  constexpr uint32_t kSign = 0x80000000;
  constexpr float kSmall = 0.625f, kTwoLog2E = 2.885390082f;
  constexpr float kCoefficients[] = {-5.704988725e-03f, 2.063908987e-02f, -5.373971537e-02f, 1.333144158e-01f,
                                     -3.333328068e-01f};
  const Floats magnitude = (Floats)((Bits)x & ~kSign), square = x * x;
  const Floats e = exp2(magnitude * -kTwoLog2E), one_plus_e = 1.0f + e;
  const Floats large = 1.0f - 2.0f * e / one_plus_e;
  const Floats small = x * square * polynomial(kCoefficients, square) + x;
  const Floats value = magnitude < kSmall ? small : (Floats)((Bits)large | ((Bits)x & kSign));
  return {value, 4.0f * e / (one_plus_e * one_plus_e)};
}

// Rows i and i + S of the two become those of the transposed 2x2 blocks of size S.
template <int S, bool kUpper>
constexpr int transposed_lane(int j) {
  if (kUpper) return j & S ? kLanes + j - S : j;
  return j & S ? kLanes + j : j + S;
}

template <int... I>
FASTATTN_INLINE Floats lanes_of(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Ints{I...});
#endif
}

template <int S, bool kUpper, int... J>
FASTATTN_INLINE Floats exchange(Floats a, Floats b, std::integer_sequence<int, J...>) {
  return lanes_of<transposed_lane<S, kUpper>(J)...>(a, b);
}

template <int S = 1>
FASTATTN_INLINE void transpose(Floats (&rows)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Floats upper = exchange<S, true>(rows[i], rows[i + S], Lanes{});
    rows[i + S] = exchange<S, false>(rows[i], rows[i + S], Lanes{});
    rows[i] = upper;
  }
  if constexpr (2 * S < kLanes) transpose<2 * S>(rows);
}

// Half of the lanes of two vectors, each of which holds parts of S sums: those that meet the other half's in a step of
// sums_of_lanes. No step takes a lane out of its four but those that move fours whole, which processors do fastest.
template <int S, bool kFirst>
constexpr int halved_lane(int j) {
  const int four = j / 4, in_four = j % 4, other = kFirst ? 0 : 1;
  if constexpr (S == 1) {
    return in_four % 2 * kLanes + 4 * four + in_four / 2 + 2 * other;
  } else if constexpr (S == 2) {
    return in_four / 2 * kLanes + 4 * four + in_four % 2 + 2 * other;
  } else {
    constexpr int kFoursOfEach = kLanes / (S < 4 ? 4 : 8);  // which depends on S: vectors of four have none
    return four / kFoursOfEach * kLanes + 4 * (four % kFoursOfEach * 2 + other) + in_four;
  }
}

template <int S, int... J>
FASTATTN_INLINE Floats sum_of_halves(Floats a, Floats b, std::integer_sequence<int, J...>) {
  return lanes_of<halved_lane<S, true>(J)...>(a, b) + lanes_of<halved_lane<S, false>(J)...>(a, b);
}

// The sums of the lanes of each vector, that of vector i in lane i.
template <int S = 1>
FASTATTN_INLINE Floats sums_of_lanes(Floats (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2 * S) {
    rows[i] = sum_of_halves<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>{});
  }
  if constexpr (2 * S < kLanes) return sums_of_lanes<2 * S>(rows);
  return rows[0];
}

// put(j, i, vector along i) takes what get(i, j) gives as vectors along j; rows and columns are multiples of kLanes.
template <class Get, class Put>
FASTATTN_INLINE void transpose(int64_t rows, int64_t columns, Get get, Put put) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      Floats tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) tile[r] = get(i + r, j);
      transpose(tile);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) put(j + r, i, tile[r]);
    }
  }
}

// to[j][i] = from[i][j]
FASTATTN_INLINE void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                               int64_t to_stride) {
  transpose(
      rows, columns, [&](int64_t i, int64_t j) { return load(from + i * from_stride + j); },
      [&](int64_t j, int64_t i, Floats x) { store(to + j * to_stride + i, x); });
}

// The low half of each lane times y: one instruction, which GCC 12 does not find in the plain expression.
FASTATTN_INLINE Wide product_of_low_halves(Wide x, uint32_t y) {
  const Wide wide_y = Wide{} + y;
#if FASTATTN_LANES == 16
  return (Wide)_mm512_mul_epu32((__m512i)x, (__m512i)wide_y);
#elif FASTATTN_LANES == 8
  return (Wide)_mm256_mul_epu32((__m256i)x, (__m256i)wide_y);
#else
  return (x & 0xffffffff) * wide_y;
#endif
}

constexpr int64_t padded(int64_t d) { return (d + kLanes - 1) / kLanes * kLanes; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
