// The conversions of 16-bit elements: to fp32, which is exact, and from fp32, to the nearest, ties to even. Every NaN
// becomes the same one, as on the GPU.
#pragma once

#include <bit>
#include <cstdint>

namespace ptx {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinityBits = 0x7f800000;
constexpr uint16_t kNaN16 = 0x7fff;

constexpr uint32_t kExponents = 112u << 23;  // the bias of the exponents of fp32 beyond that of f16
constexpr float kHalf = 0.5f;                // its last bit stands for 2^-24, as that of a subnormal f16 does
constexpr uint32_t kHalfBits = std::bit_cast<uint32_t>(kHalf);

inline uint32_t bits_of_f16(uint32_t magnitude) {
  if (magnitude < 0x400) return std::bit_cast<uint32_t>(std::bit_cast<float>(kHalfBits + magnitude) - kHalf);
  return (magnitude << 13) + (magnitude < 0x7c00 ? kExponents : 2 * kExponents);
}

inline float float_of_f16(uint16_t x) {
  return std::bit_cast<float>(uint32_t(x & 0x8000) << 16 | bits_of_f16(x & 0x7fff));
}

inline float float_of_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// Drops that many bits of a magnitude, to the nearest, ties to even.
inline uint32_t without_low_bits(uint32_t magnitude, int bits) {
  const uint32_t below_half = (1u << (bits - 1)) - 1, odd = magnitude >> bits & 1;
  return (magnitude + below_half + odd) >> bits;
}

inline uint16_t f16_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & kMagnitude, sign = bits >> 16 & 0x8000;
  const float size = std::bit_cast<float>(magnitude);
  if (magnitude > kInfinityBits) return kNaN16;
  if (size >= 65520) return uint16_t(sign | 0x7c00);
  if (size >= 0x1p-14f) return uint16_t(sign | without_low_bits(magnitude - kExponents, 13));
  return uint16_t(sign | (std::bit_cast<uint32_t>(size + kHalf) - kHalfBits));
}

inline uint16_t bf16_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & kMagnitude;
  return magnitude > kInfinityBits ? kNaN16 : uint16_t((bits >> 16 & 0x8000) | without_low_bits(magnitude, 16));
}

}  // namespace ptx
