// The GPU's instructions that CUDA C++ has no functions for, a function each: all inline PTX of fastattn stands here.
#pragma once

#include <cstdint>

#include "elements.h"
#include "fragments.h"

namespace fastattn::cuda {

#define FASTATTN_DEVICE __device__ __forceinline__
#define FASTATTN_COLD __device__ __noinline__  // for code that is run rarely

FASTATTN_DEVICE float to_float(float x) { return x; }

FASTATTN_DEVICE float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

FASTATTN_DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// `low` and `high` rounded to Element, in a word.
template <class Element>
FASTATTN_DEVICE uint32_t pack(float low, float high);

template <>
FASTATTN_DEVICE uint32_t pack<f16>(float low, float high) {
  uint32_t word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 low, high;\n"
      " cvt.rn.f16.f32 low, %1;\n"
      " cvt.rn.f16.f32 high, %2;\n"
      " mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "f"(low), "f"(high));
#endif
  return word;
}

template <>
FASTATTN_DEVICE uint32_t pack<bf16>(float low, float high) {
  uint32_t word = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

// sums += left * right, on the tensor cores.
template <class Element>
FASTATTN_DEVICE void multiply_add(Sums& sums, const Left& left, const Right& right);

template <>
FASTATTN_DEVICE void multiply_add<f16>(Sums& sums, const Left& left, const Right& right) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[2 * half]), "r"(left[2 * half + 1]), "r"(right[half]));
  }
#endif
}

template <>
FASTATTN_DEVICE void multiply_add<bf16>(Sums& sums, const Left& left, const Right& right) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
#endif
}

FASTATTN_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Four 8 x 8 matrices of 16-bit elements: lane l brings the address of row l % 8 (16 bytes, aligned) of matrix l / 8,
// and gets of each matrix the columns 2 * (l % 4) and the one after it of row l / 4.
FASTATTN_DEVICE void load_matrices(uint32_t (&words)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// The same of the transposed matrices.
FASTATTN_DEVICE void load_transposed(uint32_t (&words)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// 16 bytes from global to shared memory, or zeros where `readable` is false: nothing is read then. They are there for
// this thread after wait_for_copies, for others after a barrier too.
FASTATTN_DEVICE void copy_16_bytes(void* shared, const void* global, bool readable) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(readable ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(shared) = readable ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#endif
}

// Ends a group of copies.
FASTATTN_DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the latest `kMayRun` groups of this thread's copies have arrived.
template <int kMayRun>
FASTATTN_DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kMayRun) : "memory");
#endif
}

// 2^x to 2 units in the last place; 0 below 2^-126.
FASTATTN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, whose value is hidden from the compiler: what is computed from it is not kept in registers from one round of a
// loop to the next, but computed again.
FASTATTN_DEVICE int computed_anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The block's shared memory, of the size it was launched with; aligned to 128 bytes.
FASTATTN_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// Whether this code is compiled for a GPU whose tensor cores take Element.
template <class Element>
constexpr bool kHasTensorCores = true;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <>
constexpr bool kHasTensorCores<bf16> = false;
#endif

}  // namespace fastattn::cuda
