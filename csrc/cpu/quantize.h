// Rows of floats as rows of int8 or float8_e4m3fn and their scales, which fastattn/paged.py defines: `quantized`.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "params.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

FASTATTN_INLINE void store_bytes(int8_t* p, Ints x) {
  *reinterpret_cast<BytesInMemory*>(p) = __builtin_convertvector(x, BytesInMemory);
}

// Both round to nearest even. No finite x is beyond the largest number.
FASTATTN_INLINE void narrow(Int8* p, Floats x) {
  constexpr float kLastPlaceIsOne = 0x1.8p23f;
  store_bytes(&p->value, (Ints)(x + kLastPlaceIsOne) - (Ints)splat(kLastPlaceIsOne));
}
FASTATTN_INLINE void narrow(Float8* p, Floats x) {
  constexpr float kLeastNormal = 0x1p-6f, kLastPlaceOfSubnormals = 0x1p14f;
  constexpr uint32_t kRebias = (127 - 7) << 23;
  const Bits sign = (Bits)x >> 24 & 0x80, magnitude = (Bits)x & 0x7fffffff;
  const Bits normal = (magnitude - kRebias + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const Bits subnormal = (Bits)((Floats)magnitude + kLastPlaceOfSubnormals) - (Bits)splat(kLastPlaceOfSubnormals);
  const Bits finite = (Floats)magnitude < kLeastNormal ? subnormal : normal;
  store_bytes(&p->bits, (Ints)((x == x ? finite : Bits{} + 0x7f) | sign));
}

// Writes a row of d elements of this dtype, and returns its scale.
float quantize(DType dtype, const char* row, int64_t d, bool is_float8, int8_t* to) {
  float scale = 0;
  with_elements(row, dtype, [&](auto* from) {
    Floats largest{};
    Ints nan{};
    for (int64_t i = 0; i < d; i += kLanes) {
      const Floats magnitude = (Floats)((Bits)widen_lanes(from + i, d - i) & 0x7fffffff);
      largest = larger(magnitude, largest);
      nan |= magnitude != magnitude;
    }
    scale = any(nan) ? std::numeric_limits<float>::quiet_NaN() : largest_lane(largest) / (is_float8 ? 448.0f : 127.0f);
    const float divisor = scale < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : scale;
    const auto write = [&](auto* numbers) {
      for (int64_t i = 0; i < d; i += kLanes) narrow_lanes(numbers + i, widen_lanes(from + i, d - i) / divisor, d - i);
    };
    is_float8 ? write(reinterpret_cast<Float8*>(to)) : write(reinterpret_cast<Int8*>(to));
  });
  return scale;
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
