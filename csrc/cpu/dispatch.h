// Which instruction set to use: the one place that asks the machine, and the environment, which may only lower it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
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
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "../dtype.h"
#include "params.h"

namespace fastattn {

// A module that was compiled for one machine lacks the kernels of others, whose address is null then.
#if defined(_WIN32)
#define FASTATTN_IF_COMPILED
#else
#define FASTATTN_IF_COMPILED __attribute__((weak))
#endif
#define FASTATTN_KERNELS(isa)                        \
  namespace isa {                                    \
  extern const Kernels kernels FASTATTN_IF_COMPILED; \
  }
#if defined(__x86_64__)
FASTATTN_KERNELS(amx)
FASTATTN_KERNELS(avx512_bf16)
FASTATTN_KERNELS(avx512)
FASTATTN_KERNELS(avx2)
#endif
#if defined(__aarch64__)
FASTATTN_KERNELS(neon_bf16)
FASTATTN_KERNELS(neon)
#else
FASTATTN_KERNELS(portable)
#endif

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
// What the processor can do, as CPUID has it, and which registers the system keeps for each thread. The compilers' own
// __builtin_cpu_supports says the same only where their runtime library has its part of it, which zig's lacks.
class Processor {
 public:
  bool is_intel() const { return of(0).b == 0x756e6547; }  // "Genu", of "GenuineIntel"
  bool has_avx2() const { return keeps(0x6) && has(of(1).c, {12, 29}) && has(of(7).b, {5}); }      // and fma, f16c
  bool has_avx512() const { return has_avx2() && keeps(0xe6) && has(of(7).b, {16, 17, 30, 31}); }  // f, dq, bw, vl
  bool has_avx512_bf16() const { return has_avx512() && has(of(7, 1).a, {5}); }
  bool has_amx_bf16() const { return has_avx512_bf16() && keeps(0x600e6) && has(of(7).d, {22, 24}); }  // and amx_tile

 private:
  struct Leaf {
    unsigned a, b, c, d;
  };
  static Leaf of(unsigned leaf, unsigned subleaf = 0) {
    Leaf result{};  // where the processor has no such leaf
    __get_cpuid_count(leaf, subleaf, &result.a, &result.b, &result.c, &result.d);
    return result;
  }
  static bool has(unsigned features, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return features >> bit & 1; });
  }
  static bool keeps(unsigned registers) {
    if (!has(of(1).c, {27})) return false;
    unsigned kept, high;
    asm("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    return (kept & registers) == registers;
  }
};

// Linux hands out the tile registers on request only, for the whole process.
inline bool may_use_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
// Whether it has FEAT_BF16.
inline bool has_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return getauxval(AT_HWCAP2) & kBf16;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}
#endif

// All of them, the fastest first.
inline std::vector<Capability> find_capabilities() {
  std::vector<Capability> all;
#if defined(__x86_64__)
  const Processor here;
  all.push_back({&amx::kernels, &avx512::kernels, here.has_amx_bf16() && may_use_amx()});
  all.push_back({&avx512_bf16::kernels, &avx512::kernels, here.has_avx512_bf16()});
  all.push_back({&avx512::kernels, &avx512::kernels, here.has_avx512()});
  // Intel's bf16 dot products run at half the rate of its FMAs (measured on Sapphire Rapids).
  if (here.is_intel()) std::swap(all[1], all[2]);
  all.push_back({&avx2::kernels, &avx2::kernels, here.has_avx2()});
#endif
#if defined(__aarch64__)
  all.push_back({&neon_bf16::kernels, &neon::kernels, has_neon_bf16()});
  all.push_back({&neon::kernels, &neon::kernels, true});
#else
  all.push_back({&portable::kernels, &portable::kernels, true});
#endif
  const auto lacking = [](const Capability& each) { return !each.bf16 || !each.others; };
  all.erase(std::remove_if(all.begin(), all.end(), lacking), all.end());
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
  if (allowed) throw std::runtime_error("this machine runs none of " + names + ", which this module was compiled for");
  throw std::invalid_argument(std::string(kCapabilityVariable) + " must be one of " + names + ", got '" + highest +
                              "'");
}

}  // namespace fastattn
