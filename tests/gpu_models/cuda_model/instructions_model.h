// The functions of csrc/cuda/instructions.cuh in plain C++, which includes this file where the compiler is not nvcc,
// and what the kernels use of CUDA C++. What each function is for stands there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../../csrc/cuda/elements.h"
#include "../../../csrc/cuda/fragments.h"
#include "half.h"
#include "language.h"
#include "multiprocessor.h"
#include "settings.h"
#include "shared.h"

namespace fastattn::cuda {

static_assert(kWarp == model::kLanes);

#define FASTATTN_DEVICE inline
#define FASTATTN_COLD inline
#define __grid_constant__

template <class Element>
constexpr bool kHasTensorCores = true;
template <>
constexpr bool kHasTensorCores<bf16> = model::kCapability >= 80;

FASTATTN_DEVICE int computed_anew(int x) { return x; }

FASTATTN_DEVICE float to_float(float x) { return x; }
FASTATTN_DEVICE float to_float(f16 x) { return model::float_of_f16(x.bits); }
FASTATTN_DEVICE float to_float(bf16 x) { return model::float_of_bf16(x.bits); }

namespace model {
template <class Element>
void check_tensor_cores() {
  if (!kHasTensorCores<Element>) throw Mistake("this GPU has no tensor cores for the elements");
}
}  // namespace model

template <class Element>
FASTATTN_DEVICE uint32_t pack(float low, float high);

template <>
FASTATTN_DEVICE uint32_t pack<f16>(float low, float high) {
  return model::f16_of(low) | uint32_t(model::f16_of(high)) << 16;
}

template <>
FASTATTN_DEVICE uint32_t pack<bf16>(float low, float high) {
  model::check_tensor_cores<bf16>();
  return model::bf16_of(low) | uint32_t(model::bf16_of(high)) << 16;
}

namespace model {

struct Factors {
  float* sums;
  const uint32_t *left, *right;
};

// Four neighbours of a row of sums.
using Quad = float __attribute__((vector_size(16)));

// The products are exact in fp32, and are added in the order of k.
template <class Element>
void multiply_add_of_warp(Multiprocessor& here, void* const* operands, int) {
  constexpr int kRows = 16, kInner = 16, kQuads = 2, kOfQuad = 4;
  float left[kRows][kInner];
  Quad right[kInner][kQuads], sums[kRows][kQuads];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Factors& x = *static_cast<const Factors*>(operands[lane]);
    const int row = lane / 4, column = 2 * (lane % 4);
    for (int i = 0; i < 8; ++i) {  // i % 2: of a word; i / 2: the word
      left[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2] = to_float(Element{uint16_t(x.left[i / 2] >> i % 2 * 16)});
    }
    for (int i = 0; i < 4; ++i) {
      right[column + i / 2 * 8 + i % 2][row / kOfQuad][row % kOfQuad] =
          to_float(Element{uint16_t(x.right[i / 2] >> i % 2 * 16)});
      sums[row + i / 2 * 8][column / kOfQuad][column % kOfQuad + i % 2] = x.sums[i];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    Quad first = sums[i][0], second = sums[i][1];
    for (int k = 0; k < kInner; ++k) first += left[i][k] * right[k][0], second += left[i][k] * right[k][1];
    sums[i][0] = first, sums[i][1] = second;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    float* of_lane = static_cast<const Factors*>(operands[lane])->sums;
    for (int i = 0; i < 4; ++i) of_lane[i] = sums[row + i / 2 * 8][column / kOfQuad][column % kOfQuad + i % 2];
  }
  ++here.counters.products;
}

template <class Element>
constexpr Instruction kMultiplyAdd = {"multiply_add", multiply_add_of_warp<Element>};

struct Load {
  uint32_t* words;
  const void* row;
};

template <bool transposed>
void load_of_warp(Multiprocessor& here, void* const* operands, int) {
  constexpr int kMatrices = 4, kSize = 8;
  static constexpr const char* kName = transposed ? "load_transposed" : "load_matrices";
  const auto of_lane = [&](int lane) -> const Load& { return *static_cast<const Load*>(operands[lane]); };
  for (int m = 0; m < kMatrices; ++m) {
    int rows[kSize];
    uint16_t matrix[kSize][kSize];
    for (int i = 0; i < kSize; ++i) {
      const void* row = of_lane(kSize * m + i).row;
      rows[i] = here.shared().row(row, kName);
      std::memcpy(matrix[i], row, sizeof matrix[i]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4, column = 2 * (lane % 4);
      const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
      const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
      of_lane(lane).words[m] = low | high << 16;
    }
    here.counters.load_conflicts += extra_wavefronts(rows);
  }
  ++here.counters.loads;
}

inline constexpr Instruction kLoadMatrices = {"load_matrices", load_of_warp<false>};
inline constexpr Instruction kLoadTransposed = {"load_transposed", load_of_warp<true>};

}  // namespace model

template <class Element>
FASTATTN_DEVICE void multiply_add(Sums& sums, const Left& left, const Right& right,
                                  const model::Place& place = model::Place::current()) {
  model::check_tensor_cores<Element>();
  model::Factors factors{sums, left, right};
  model::here().meet(model::kMultiplyAdd<Element>, &factors, place);
}

FASTATTN_DEVICE void load_matrices(uint32_t (&words)[4], const void* shared_row,
                                   const model::Place& place = model::Place::current()) {
  model::Load load{words, shared_row};
  model::here().meet(model::kLoadMatrices, &load, place);
}

FASTATTN_DEVICE void load_transposed(uint32_t (&words)[4], const void* shared_row,
                                     const model::Place& place = model::Place::current()) {
  model::Load load{words, shared_row};
  model::here().meet(model::kLoadTransposed, &load, place);
}

FASTATTN_DEVICE void commit_copies() { model::here().commit(); }

template <int kMayRun>
FASTATTN_DEVICE void wait_for_copies() {
  model::here().wait(kMayRun);
}

FASTATTN_DEVICE void copy_16_bytes(void* shared, const void* global, bool readable) {
  if (reinterpret_cast<uintptr_t>(global) % model::kRowBytes != 0) {
    throw model::Mistake("copy_16_bytes from an address that is not a multiple of 16");
  }
  model::here().copy(static_cast<char*>(shared), readable ? global : nullptr);
}

FASTATTN_DEVICE float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

FASTATTN_DEVICE char* shared_memory() { return model::here().shared().data(); }

}  // namespace fastattn::cuda
