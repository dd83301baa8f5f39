// The peak rate of multiply-adds, on registers alone, which bounds that of the kernels. The result itself is of no use.
#pragma once

#include <cstdint>

#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Independent chains, as many as the registers hold beside the factor: an FMA takes 4 to 5 cycles, and two start in
// each, on some processors four.
#if defined(__aarch64__)
constexpr int kChains = 24;
#else
constexpr int kChains = kLanes == 16 ? 24 : 12;
#endif
constexpr int64_t kChainOperations = 2 * kChains * kLanes;  // of one step

// Takes `steps` steps in every chain. The sum of the chains is returned so that the compiler keeps them.
float fma_chains(int64_t steps) {
  // x -> -2 x + x = -x, without overflow or subnormal numbers; x is the term too, since the FMAs of NEON write the sum
  // where the term was. Chains that begin at equal numbers would be left out by the compiler.
  const Floats factor = splat(-2.0f);
  Floats chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = splat(-float(c));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 32
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * factor + chains[c];
  }
  Floats sum = {};
  for (int c = 0; c < kChains; ++c) sum += chains[c];
  return sum[0];
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
