// Which instruction set to use: the one place that asks the machine, and the environment, which may only lower it.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../dtype.h"
#include "params.h"

namespace fastattn {

#if defined(__x86_64__)
namespace amx {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

constexpr const char* kCapabilityVariable = "FASTATTN_CPU_CAPABILITY";

// An instruction set that this module has kernels for, and whether this machine has it. Kernels that take bf16 only are
// paired with those of another set for the other dtypes.
struct Capability {
  const Kernels *bf16, *others;
  bool runs_here;

  const char* name() const { return bf16->name; }
  const Kernels& kernels_for(DType dtype) const { return dtype == DType::bf16 ? *bf16 : *others; }
};

#if defined(__x86_64__)
// Linux hands out the tile registers on request only, for the whole process.
inline bool may_use_amx() {
  unsigned a, b, c, d;
  constexpr unsigned kTilesAndBf16 = 1u << 24 | 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTilesAndBf16) != kTilesAndBf16) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// All of them, the fastest first.
inline std::vector<Capability> find_capabilities() {
  std::vector<Capability> all;
#if defined(__x86_64__)
  const bool runs_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool runs_avx512 = runs_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool runs_avx512_bf16 = runs_avx512 && __builtin_cpu_supports("avx512bf16");
  all.push_back({&amx::kernels, &avx512::kernels, runs_avx512_bf16 && may_use_amx()});
  all.push_back({&avx512_bf16::kernels, &avx512::kernels, runs_avx512_bf16});
  all.push_back({&avx512::kernels, &avx512::kernels, runs_avx512});
  // Intel's bf16 dot products run at half the rate of its FMAs (measured on Sapphire Rapids).
  if (__builtin_cpu_is("intel")) std::swap(all[1], all[2]);
  all.push_back({&avx2::kernels, &avx2::kernels, runs_avx2});
#endif
  all.push_back({&portable::kernels, &portable::kernels, true});
  return all;
}

inline const std::vector<Capability>& capabilities() {
  static const std::vector<Capability> result = find_capabilities();
  return result;
}

// The best one that runs here, from the named one downwards.
inline const Capability& choose_capability() {
  const char* highest = std::getenv(kCapabilityVariable);
  bool allowed = highest == nullptr || *highest == '\0';
  std::string names;
  for (const Capability& capability : capabilities()) {
    allowed = allowed || std::string(highest) == capability.name();
    if (allowed && capability.runs_here) return capability;
    names += (names.empty() ? "'" : ", '") + std::string(capability.name()) + "'";
  }
  throw std::invalid_argument(std::string(kCapabilityVariable) + " must be one of " + names + ", got '" + highest +
                              "'");
}

}  // namespace fastattn
