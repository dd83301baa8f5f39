// What CUDA C++ adds to C++, as far as the kernels use it.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "multiprocessor.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class X, class Y>
constexpr std::common_type_t<X, Y> min(X x, Y y) {
  return y < x ? y : x;
}
template <class X, class Y>
constexpr std::common_type_t<X, Y> max(X x, Y y) {
  return x < y ? y : x;
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
template <class T>
T __ldg(const T* x) {
  return *x;
}

template <class T>
T atomicAdd(T* sum, T x) {
  return std::atomic_ref<T>(*sum).fetch_add(x);
}

namespace fastattn::cuda::model {

// A built-in variable: .x is what get() says where it is read.
template <auto get>
struct Builtin {
  struct {
    operator unsigned() const { return static_cast<unsigned>(get()); }
  } x;
};

struct Exchange {  // of the lanes of a warp
  uint64_t bits;
  int from;
  uint64_t received;
};

inline constexpr Instruction kShuffle = {"a shuffle", [](Multiprocessor&, void* const* operands, int lanes) {
  for (int i = 0; i < lanes; ++i) {
    auto* x = static_cast<Exchange*>(operands[i]);
    x->received = static_cast<const Exchange*>(operands[x->from])->bits;
  }
}};

struct Vote {
  bool yes;
  unsigned of_all;  // lanes
};

inline constexpr Instruction kVote = {"a vote", [](Multiprocessor&, void* const* operands, int lanes) {
  unsigned of_all = 0;
  for (int i = 0; i < lanes; ++i) of_all |= unsigned(static_cast<const Vote*>(operands[i])->yes) << i;
  for (int i = 0; i < lanes; ++i) static_cast<Vote*>(operands[i])->of_all = of_all;
}};

inline constexpr Instruction kSyncWarp = {"__syncwarp", [](Multiprocessor&, void* const*, int) {}};

inline constexpr Instruction kSyncThreads = {"__syncthreads", [](Multiprocessor&, void* const*, int) {}, true};

inline constexpr Instruction kSyncThreadsOr = {"__syncthreads_or", [](Multiprocessor&, void* const* operands, int threads) {
  int any = 0;
  for (int i = 0; i < threads; ++i) any |= *static_cast<const int*>(operands[i]) != 0;
  for (int i = 0; i < threads; ++i) *static_cast<int*>(operands[i]) = any;
}, true};

inline void check_mask(unsigned mask) {
  if (mask != 0xffffffff) throw Mistake("the mask of lanes must be 0xffffffff, got " + std::to_string(mask));
}

// What the lane `from` brings; a lane outside the part of the warp asks itself.
template <class T>
T exchange(unsigned mask, T value, int from, const Place& place) {
  static_assert(std::is_arithmetic_v<T>);
  check_mask(mask);
  Exchange x{0, from, 0};
  std::memcpy(&x.bits, &value, sizeof value);
  Multiprocessor::current().meet(kShuffle, &x, place);
  std::memcpy(&value, &x.received, sizeof value);
  return value;
}

inline unsigned vote(unsigned mask, bool yes, const Place& place) {
  check_mask(mask);
  Vote x{yes, 0};
  Multiprocessor::current().meet(kVote, &x, place);
  return x.of_all;
}

inline int this_lane() { return Multiprocessor::current().lane(); }

}  // namespace fastattn::cuda::model

inline constexpr fastattn::cuda::model::Builtin<[] { return fastattn::cuda::model::Multiprocessor::current().thread(); }>
    threadIdx{};
inline constexpr fastattn::cuda::model::Builtin<[] { return fastattn::cuda::model::Multiprocessor::current().block(); }>
    blockIdx{};
inline constexpr fastattn::cuda::model::Builtin<
    [] { return fastattn::cuda::model::Multiprocessor::current().grid().threads; }>
    blockDim{};
inline constexpr fastattn::cuda::model::Builtin<
    [] { return fastattn::cuda::model::Multiprocessor::current().grid().blocks; }>
    gridDim{};

// `width`: of the parts of the warp that exchange among themselves, a power of two.

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  const int own = fastattn::cuda::model::this_lane();
  return fastattn::cuda::model::exchange(mask, value, (own & -width) | (lane & (width - 1)), place);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, int width = 32,
                  const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  const int own = fastattn::cuda::model::this_lane(), from = own ^ flipped;
  return fastattn::cuda::model::exchange(mask, value, from <= (own | (width - 1)) ? from : own, place);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  const int own = fastattn::cuda::model::this_lane(), from = own + int(delta);
  return fastattn::cuda::model::exchange(mask, value, from <= (own | (width - 1)) ? from : own, place);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  const int own = fastattn::cuda::model::this_lane(), from = own - int(delta);
  return fastattn::cuda::model::exchange(mask, value, from >= (own & -width) ? from : own, place);
}

inline unsigned __ballot_sync(unsigned mask, int yes,
                              const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  return fastattn::cuda::model::vote(mask, yes != 0, place);
}

inline int __any_sync(unsigned mask, int yes,
                      const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  return fastattn::cuda::model::vote(mask, yes != 0, place) != 0;
}

inline int __all_sync(unsigned mask, int yes,
                      const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  return fastattn::cuda::model::vote(mask, yes != 0, place) == 0xffffffff;
}

inline void __syncwarp(unsigned mask = 0xffffffff,
                       const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  fastattn::cuda::model::check_mask(mask);
  fastattn::cuda::model::Multiprocessor::current().meet(fastattn::cuda::model::kSyncWarp, nullptr, place);
}

inline void __syncthreads(const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  fastattn::cuda::model::Multiprocessor::current().meet(fastattn::cuda::model::kSyncThreads, nullptr, place);
}

inline int __syncthreads_or(int yes, const fastattn::cuda::model::Place& place = fastattn::cuda::model::Place::current()) {
  fastattn::cuda::model::Multiprocessor::current().meet(fastattn::cuda::model::kSyncThreadsOr, &yes, place);
  return yes;
}
