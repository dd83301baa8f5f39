// The conversions of 16-bit elements: to fp32, which is exact, and from fp32, to the nearest, ties to even. Every NaN
// becomes the same one, as on the GPU.
#pragma once

#include <bit>
#include <cstdint>

namespace fastattn::cuda::model {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinityBits = 0x7f800000;
constexpr uint16_t kNaN16 = 0x7fff;

// The exponent and the fraction where fp32 has them; a multiplication corrects the bias of the exponent, also of what is
// subnormal as f16 or zero.
inline float float_of_f16(uint16_t x) {
  const uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | ((x & 0x7c00) == 0x7c00 ? magnitude | kInfinityBits : finite));
}

inline float float_of_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// Drops that many bits of a magnitude, to the nearest, ties to even.
inline uint32_t without_low_bits(uint32_t magnitude, int bits) {
  const uint32_t below_half = (1u << (bits - 1)) - 1, odd = magnitude >> bits & 1;
  return (magnitude + below_half + odd) >> bits;
}

inline uint16_t f16_of(float x) {
  constexpr uint32_t kBias = 112u << 23;  // of the exponents of fp32 over those of f16
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & kMagnitude, sign = bits >> 16 & 0x8000;
  if (magnitude > kInfinityBits) return kNaN16;
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f)) return uint16_t(sign | 0x7c00);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    const float in_place = std::bit_cast<float>(magnitude) + 0.5f;  // its last bit stands for 2^-24, as f16's does
    return uint16_t(sign | (std::bit_cast<uint32_t>(in_place) - std::bit_cast<uint32_t>(0.5f)));
  }
  return uint16_t(sign | without_low_bits(magnitude - kBias, 13));
}

inline uint16_t bf16_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & kMagnitude;
  return magnitude > kInfinityBits ? kNaN16 : uint16_t((bits >> 16 & 0x8000) | without_low_bits(magnitude, 16));
}

}  // namespace fastattn::cuda::model
