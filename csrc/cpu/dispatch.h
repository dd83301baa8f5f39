// Which instruction set to use: the one place that asks the machine, and the environment, which may only lower it.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

namespace fastattn {

#if defined(__x86_64__)
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

// All that this module has kernels for, best first, and whether this machine runs them.
struct Capability {
  const Kernels* kernels;
  bool runs_here;
};

inline std::vector<Capability> capabilities() {
  std::vector<Capability> all;
#if defined(__x86_64__)
  const bool runs_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool runs_avx512 = runs_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  all.push_back({&avx512::kernels, runs_avx512});
  all.push_back({&avx2::kernels, runs_avx2});
#endif
  all.push_back({&portable::kernels, true});
  return all;
}

// The best kernels that run here, from the named ones downwards.
inline const Kernels& choose_kernels() {
  const char* highest = std::getenv(kCapabilityVariable);
  bool allowed = highest == nullptr || *highest == '\0';
  std::string names;
  for (const Capability& capability : capabilities()) {
    allowed = allowed || std::string(highest) == capability.kernels->name;
    if (allowed && capability.runs_here) return *capability.kernels;
    names += (names.empty() ? "'" : ", '") + std::string(capability.kernels->name) + "'";
  }
  throw std::invalid_argument(std::string(kCapabilityVariable) + " must be one of " + names + ", got '" + highest + "'");
}

}  // namespace fastattn
