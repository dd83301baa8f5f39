// What CUDA C++ adds to C++, as far as the kernels use it.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "multiprocessor.h"
#include "settings.h"

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

inline Multiprocessor& here() { return Multiprocessor::current(); }

inline unsigned thread_index() { return here().thread(); }
inline unsigned block_index() { return static_cast<unsigned>(here().block()); }
inline unsigned block_size() { return here().grid().threads; }
inline unsigned grid_size() { return static_cast<unsigned>(here().grid().blocks); }

// A built-in variable, whose .x is what get() says where it is read.
template <unsigned (*get)()>
struct Builtin {
  struct {
    operator unsigned() const { return get(); }
  } x;
};
inline constexpr Builtin<thread_index> threadIdx{};
inline constexpr Builtin<block_index> blockIdx{};
inline constexpr Builtin<block_size> blockDim{};
inline constexpr Builtin<grid_size> gridDim{};

inline void check_mask(unsigned mask) {
  if (mask != 0xffffffff) throw Mistake("the mask of lanes must be 0xffffffff, got " + std::to_string(mask));
}

struct Shuffled {
  uint64_t bits;
  int from;  // the lane whose bits this one wants
  uint64_t received;
};

inline void shuffle_warp(Multiprocessor&, void* const* operands, int lanes) {
  const auto of_lane = [&](int lane) { return static_cast<Shuffled*>(operands[lane]); };
  for (int i = 0; i < lanes; ++i) of_lane(i)->received = of_lane(of_lane(i)->from)->bits;
}
inline constexpr Instruction kShuffle = {"a shuffle", shuffle_warp};

template <class T>
T shuffle(unsigned mask, T value, int from, const Place& place) {
  static_assert(std::is_arithmetic_v<T>);
  check_mask(mask);
  Shuffled x{0, from, 0};
  std::memcpy(&x.bits, &value, sizeof value);
  here().meet(kShuffle, &x, place);
  std::memcpy(&value, &x.received, sizeof value);
  return value;
}
// Lanes shuffle among the `width` of their part of the warp, a power of two. One that asks beyond it gets its own
// value.

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = kLanes, const Place& place = Place::current()) {
  return shuffle(mask, value, (here().lane() & -width) | (lane & (width - 1)), place);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, int width = kLanes, const Place& place = Place::current()) {
  const int own = here().lane(), from = own ^ flipped;
  return shuffle(mask, value, from <= (own | (width - 1)) ? from : own, place);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = kLanes, const Place& place = Place::current()) {
  const int own = here().lane(), from = own + distance;
  return shuffle(mask, value, from <= (own | (width - 1)) ? from : own, place);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = kLanes, const Place& place = Place::current()) {
  const int own = here().lane(), from = own - distance;
  return shuffle(mask, value, from >= (own & -width) ? from : own, place);
}

struct Vote {
  bool yes;
  unsigned of_all;  // bit l: that of lane l
};

inline void vote_of_warp(Multiprocessor&, void* const* operands, int lanes) {
  const auto of_lane = [&](int lane) { return static_cast<Vote*>(operands[lane]); };
  unsigned of_all = 0;
  for (int i = 0; i < lanes; ++i) of_all |= unsigned(of_lane(i)->yes) << i;
  for (int i = 0; i < lanes; ++i) of_lane(i)->of_all = of_all;
}
inline constexpr Instruction kVote = {"a vote", vote_of_warp};

inline unsigned __ballot_sync(unsigned mask, int yes, const Place& place = Place::current()) {
  check_mask(mask);
  Vote vote{yes != 0, 0};
  here().meet(kVote, &vote, place);
  return vote.of_all;
}

inline int __any_sync(unsigned mask, int yes, const Place& place = Place::current()) {
  return __ballot_sync(mask, yes, place) != 0;
}

inline int __all_sync(unsigned mask, int yes, const Place& place = Place::current()) {
  return __ballot_sync(mask, yes, place) == 0xffffffff;
}

inline void nothing(Multiprocessor&, void* const*, int) {}
inline constexpr Instruction kSyncWarp = {"__syncwarp", nothing};
inline constexpr Instruction kSyncThreads = {"__syncthreads", nothing, true};

inline void or_of_block(Multiprocessor&, void* const* operands, int threads) {
  const auto of_thread = [&](int thread) { return static_cast<int*>(operands[thread]); };
  bool any = false;
  for (int i = 0; i < threads; ++i) any = any || *of_thread(i) != 0;
  for (int i = 0; i < threads; ++i) *of_thread(i) = any;
}
inline constexpr Instruction kSyncThreadsOr = {"__syncthreads_or", or_of_block, true};

inline void __syncwarp(unsigned mask = 0xffffffff, const Place& place = Place::current()) {
  check_mask(mask);
  here().meet(kSyncWarp, nullptr, place);
}

inline void __syncthreads(const Place& place = Place::current()) { here().meet(kSyncThreads, nullptr, place); }

inline int __syncthreads_or(int yes, const Place& place = Place::current()) {
  here().meet(kSyncThreadsOr, &yes, place);
  return yes;
}

}  // namespace fastattn::cuda::model

using fastattn::cuda::model::__ballot_sync, fastattn::cuda::model::__any_sync, fastattn::cuda::model::__all_sync;
using fastattn::cuda::model::__shfl_sync, fastattn::cuda::model::__shfl_xor_sync;
using fastattn::cuda::model::__shfl_up_sync, fastattn::cuda::model::__shfl_down_sync;
using fastattn::cuda::model::__syncwarp, fastattn::cuda::model::__syncthreads, fastattn::cuda::model::__syncthreads_or;
using fastattn::cuda::model::blockDim, fastattn::cuda::model::gridDim;
using fastattn::cuda::model::threadIdx, fastattn::cuda::model::blockIdx;
