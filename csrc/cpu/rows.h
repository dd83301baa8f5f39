// Rows in memory, of any dtype, to and from rows of floats. All arithmetic in between is fp32.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif FASTATTN_LANES > 4
#include <immintrin.h>
#endif

#include "params.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

typedef int8_t BytesInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint16_t HalvesInMemory __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
struct Float8 {  // e4m3fn: no Inf, and NaN where all bits but the sign are ones
  int8_t bits;
};

// One instruction, where GCC 12 makes five of the plain conversion.
FASTATTN_INLINE Bits widened_bits(Halves x) {
#if FASTATTN_LANES == 16
  return (Bits)_mm512_cvtepu16_epi32((__m256i)x);
#elif FASTATTN_LANES == 8
  return (Bits)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Bits);
#endif
}

FASTATTN_INLINE Bits load_bits(const uint16_t* p) { return widened_bits(*reinterpret_cast<const HalvesInMemory*>(p)); }
FASTATTN_INLINE void store_bits(uint16_t* p, Bits x) {
  *reinterpret_cast<HalvesInMemory*>(p) = __builtin_convertvector(x, HalvesInMemory);
}

FASTATTN_INLINE Floats widen(const float* p) { return load(p); }

FASTATTN_INLINE Floats widen(const BFloat16* p) { return (Floats)(load_bits(&p->bits) << 16); }

FASTATTN_INLINE void narrow(float* p, Floats x) { store(p, x); }

FASTATTN_INLINE Floats widen(const Int8* p) {
#if FASTATTN_LANES == 16
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif FASTATTN_LANES == 8
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const BytesInMemory*>(p), Floats);
#endif
}

// Both round to nearest even; every NaN becomes the quiet one.
FASTATTN_INLINE void narrow(BFloat16* p, Floats x) {
#if FASTATTN_BF16 && defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)));
#else
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_bits(&p->bits, x == x ? rounded : (Bits{} + 0x7fc0));
#endif
}

// fp16 has instructions of its own where there are AVX-512, F16C or NEON.
#if FASTATTN_LANES == 16

FASTATTN_INLINE Floats widen_halves(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
FASTATTN_INLINE void narrow(Float16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

#elif FASTATTN_LANES == 8

FASTATTN_INLINE Floats widen_halves(Halves x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
FASTATTN_INLINE void narrow(Float16* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

FASTATTN_INLINE Floats widen_halves(Halves x) { return (Floats)vcvt_f32_f16((float16x4_t)x); }
FASTATTN_INLINE void narrow(Float16* p, Floats x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}

#else

FASTATTN_INLINE Floats widen_halves(Halves x) {
  const Bits half = __builtin_convertvector(x, Bits);
  const Bits magnitude = half & 0x7fff;
  // Subnormal numbers are multiples of 2^-24, and the largest exponent is Inf or NaN. None is made of a subnormal fp32
  // number, which PyTorch may have been told to take for 0.
  const Floats subnormal = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-24f;
  const Bits normal = (magnitude << 13) + (112 << 23), special = (magnitude << 13) | 0x7f800000;
  const Bits finite = magnitude < 0x400 ? (Bits)subnormal : normal;
  return (Floats)((magnitude >= 0x7c00 ? special : finite) | (half & 0x8000) << 16);
}

FASTATTN_INLINE void narrow(Float16* p, Floats x) {
  const Bits sign = ((Bits)x >> 16) & 0x8000;
  const Bits magnitude = (Bits)x & 0x7fffffff;
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const Bits normal = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Bits subnormal = (Bits)((Floats)magnitude + 0.5f) - 0x3f000000;  // the last place of 0.5 is 2^-24
  Bits half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x47800000 ? (Bits{} + 0x7c00) : half;
  half = magnitude > 0x7f800000 ? (Bits{} + 0x7e00) : half;
  store_bits(&p->bits, half | sign);
}

#endif

FASTATTN_INLINE Floats widen(const Float16* p) { return widen_halves(*reinterpret_cast<const HalvesInMemory*>(p)); }

// The bits are those of an fp16 number that is 2^8 times smaller. As those of an fp32 number, 2^120 times smaller, they
// would be slow where that is subnormal, and 0 where PyTorch has been told to take such numbers for 0.
FASTATTN_INLINE Floats widen(const Float8* p) {
#if FASTATTN_LANES == 16
  const Halves x = (Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif FASTATTN_LANES == 8
  const Halves x = (Halves)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const Halves x = __builtin_convertvector(*reinterpret_cast<const BytesInMemory*>(p), Halves);
#endif
  const Halves nan = (Halves)((x | 0xff80) == 0xffff);  // all bits of such an element
  return widen_halves((x << 7 & 0xbf80) | nan) * 0x1p8f;
}

// The floats from[0..n) in the first lanes, zeros in the others.
template <class Element>
FASTATTN_ONCE Floats widen_few(const Element* from, int64_t n) {
  Element lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = from[i];
  return widen(lanes);
}
#if FASTATTN_LANES == 16  // of which head dims such as 40 and 72 fill half
FASTATTN_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
FASTATTN_INLINE Halves few_halves(const uint16_t* p, int64_t n) {
  return (Halves)_mm256_maskz_loadu_epi16(first_lanes(n), p);
}
FASTATTN_INLINE Floats widen_few(const float* p, int64_t n) { return (Floats)_mm512_maskz_loadu_ps(first_lanes(n), p); }
FASTATTN_INLINE Floats widen_few(const BFloat16* p, int64_t n) {
  return (Floats)(widened_bits(few_halves(&p->bits, n)) << 16);
}
FASTATTN_INLINE Floats widen_few(const Float16* p, int64_t n) { return widen_halves(few_halves(&p->bits, n)); }
#endif
template <class Element>
FASTATTN_INLINE Floats widen_lanes(const Element* from, int64_t n) {
  return n >= kLanes ? widen(from) : widen_few(from, n);
}

// to[0..d) = from[0..d), and 0 up to the next multiple of kLanes.
template <class Element>
FASTATTN_INLINE void widen_row(const Element* from, int64_t d, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(to + i, widen(from + i));
  if (i < d) store(to + i, widen_lanes(from + i, d - i));
}

// to[0..n) = the first n lanes of x
template <class Element>
FASTATTN_ONCE void narrow_few(Element* to, Floats x, int64_t n) {
  Element lanes[kLanes];
  narrow(lanes, x);
  for (int64_t i = 0; i < n; ++i) to[i] = lanes[i];
}
#if FASTATTN_LANES == 16
FASTATTN_INLINE void narrow_few(float* p, Floats x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)x); }
#endif
template <class Element>
FASTATTN_INLINE void narrow_lanes(Element* to, Floats x, int64_t n) {
  n >= kLanes ? narrow(to, x) : narrow_few(to, x, n);
}

// to[0..d) = factor * from[0..d); from may be read up to the next multiple of kLanes.
template <class Element>
FASTATTN_INLINE void narrow_row(const float* from, float factor, int64_t d, Element* to) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) narrow(to + i, load(from + i) * factor);
  if (i < d) narrow_lanes(to + i, load(from + i) * factor, d - i);
}

template <class Row, class Use>
FASTATTN_INLINE void with_elements(Row row, DType dtype, Use use) {
  constexpr bool kConst = std::is_same<Row, const char*>::value;
  switch (dtype) {
    case DType::f32:
      return use(reinterpret_cast<std::conditional_t<kConst, const float, float>*>(row));
    case DType::bf16:
      return use(reinterpret_cast<std::conditional_t<kConst, const BFloat16, BFloat16>*>(row));
    case DType::f16:
      return use(reinterpret_cast<std::conditional_t<kConst, const Float16, Float16>*>(row));
    case DType::i8:
      return;  // only keys and values are of 8 bits, see with_rows
  }
}

// use(the first element of x), which may be of 8 bits too.
template <class Use>
FASTATTN_INLINE void with_rows(const Input& x, Use use) {
  if (x.dtype == DType::i8 && x.is_float8) return use(reinterpret_cast<const Float8*>(x.data));
  if (x.dtype == DType::i8) return use(reinterpret_cast<const Int8*>(x.data));
  with_elements(x.data, x.dtype, use);
}
template <class Element>
constexpr bool kIsScaled = sizeof(Element) == 1;
template <class Element>
constexpr DType kDTypeOf = std::is_same<Element, float>::value      ? DType::f32
                           : std::is_same<Element, BFloat16>::value ? DType::bf16
                           : std::is_same<Element, Float16>::value  ? DType::f16
                                                                    : DType::i8;

// Rows i, ..., i + n - 1 of a list, [n, padded d], those of 8 bits times their scales.
[[maybe_unused]] void read_rows(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t i, int64_t n,
                                int64_t d, float* to) {
  with_rows(x, [&](auto* data) {
    for (int64_t j = 0; j < n; ++j) {
      float* const row = to + j * padded(d);
      widen_row(reinterpret_cast<decltype(data)>(x.row(b, h, list.at(i + j))), d, row);
      if constexpr (kIsScaled<std::remove_pointer_t<decltype(data)>>) {
        const float scale = *x.scale(b, h, list.at(i + j));
        for (int64_t column = 0; column < d; column += kLanes) store(row + column, load(row + column) * scale);
      }
    }
  });
}

// tile[j] = element d + j of n rows of a list from the place `first` on, one in each lane. Beyond n, and beyond d_end,
// there are zeros.
void read_columns(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t first, int64_t n, int64_t d,
                  int64_t d_end, Floats (&tile)[kLanes]) {
  with_elements(x.row(b, h, 0), x.dtype, [&](auto* rows) {
#pragma GCC unroll 1  // kLanes copies for each dtype would take long to compile
    for (int64_t i = 0; i < kLanes; ++i) {
      tile[i] = i < n ? widen_lanes(rows + list.at(first + i) * x.row_stride + d, d_end - d) : Floats{};
    }
  });
  transpose(tile);
}

[[maybe_unused]] void write_row(const Output& x, int64_t b, int64_t h, int64_t i, int64_t d, const float* from,
                                float factor) {
  with_elements(x.row(b, h, i), x.dtype, [&](auto* to) { narrow_row(from, factor, d, to); });
}

void zero_row(const Output& x, int64_t b, int64_t h, int64_t i, int64_t d) {
  if (d > 0) __builtin_memset(x.row(b, h, i), 0, bytes_of(x.dtype) * d);  // else the address may be null
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
