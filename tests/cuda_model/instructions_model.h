// The functions of csrc/cuda/instructions.cuh in plain C++, which includes this file where the compiler is not nvcc, and
// what the kernels use of CUDA C++. What each function is for stands there.
#pragma once

#include <cmath>
#include <cstdint>

#include "half.h"
#include "language.h"

namespace fastattn::cuda {

static_assert(kWarp == model::kLanes);

#define FASTATTN_DEVICE inline

FASTATTN_DEVICE float to_float(float x) { return x; }
FASTATTN_DEVICE float to_float(f16 x) { return model::float_of_f16(x.bits); }
FASTATTN_DEVICE float to_float(bf16 x) { return model::float_of_bf16(x.bits); }

template <class Element>
FASTATTN_DEVICE uint32_t pack(float low, float high);

template <>
FASTATTN_DEVICE uint32_t pack<f16>(float low, float high) {
  return model::f16_of(low) | uint32_t(model::f16_of(high)) << 16;
}

template <>
FASTATTN_DEVICE uint32_t pack<bf16>(float low, float high) {
  return model::bf16_of(low) | uint32_t(model::bf16_of(high)) << 16;
}

namespace model {

struct Factors {
  float* sums;
  const uint32_t *left, *right;
};

// Eight sums, or what they are made of, at once.
using Row = float __attribute__((vector_size(32)));

// The products are exact in fp32, and are added in the order of k.
template <class Element>
void multiply_add_of_warp(Multiprocessor& here, void* const* operands, int) {
  constexpr int kRows = 16, kColumns = 8, kInner = 16;
  Element left[kRows * kInner], right[kInner * kColumns];
  const auto of_lane = [&](int lane) -> const Factors& { return *static_cast<const Factors*>(operands[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto [sums, of_left, of_right] = of_lane(lane);
    const int row = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) std::memcpy(&left[(row + 8 * (i % 2)) * kInner + pair + 8 * (i / 2)], &of_left[i], 4);
    for (int i = 0; i < 4; ++i) {
      right[(pair + 8 * (i / 2) + i % 2) * kColumns + row].bits = uint16_t(of_right[i / 2] >> 16 * (i % 2));
    }
  }
  float rows[kRows * kInner];
  Row columns[kInner], sums[kRows];
  const auto each_sum = [&](auto visit) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) visit(of_lane(lane).sums[i], sums[lane / 4 + 8 * (i / 2)], 2 * (lane % 4) + i % 2);
    }
  };
  for (int i = 0; i < kRows * kInner; ++i) rows[i] = to_float(left[i]);
  for (int i = 0; i < kInner * kColumns; ++i) columns[i / kColumns][i % kColumns] = to_float(right[i]);
  each_sum([](float of_lane, Row& row, int column) { row[column] = of_lane; });
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kInner; ++k) sums[i] += rows[i * kInner + k] * columns[k];
  }
  each_sum([](float& of_lane, const Row& row, int column) { of_lane = row[column]; });
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

constexpr bool kCopiesLater = FASTATTN_MODEL_CAPABILITY >= 80;

}  // namespace model

template <class Element>
FASTATTN_DEVICE void multiply_add(Sums& sums, const Left& left, const Right& right,
                                  const model::Place& place = model::Place::current()) {
  model::Factors factors{sums, left, right};
  model::Multiprocessor::current().meet(model::kMultiplyAdd<Element>, &factors, place);
}

FASTATTN_DEVICE void load_matrices(uint32_t (&words)[4], const void* shared_row,
                                   const model::Place& place = model::Place::current()) {
  model::Load load{words, shared_row};
  model::Multiprocessor::current().meet(model::kLoadMatrices, &load, place);
}

FASTATTN_DEVICE void load_transposed(uint32_t (&words)[4], const void* shared_row,
                                     const model::Place& place = model::Place::current()) {
  model::Load load{words, shared_row};
  model::Multiprocessor::current().meet(model::kLoadTransposed, &load, place);
}

FASTATTN_DEVICE void commit_copies() { model::Multiprocessor::current().commit(); }

template <int kMayRun>
FASTATTN_DEVICE void wait_for_copies() {
  model::Multiprocessor::current().wait(kMayRun);
}

FASTATTN_DEVICE void copy_16_bytes(void* shared, const void* global, bool readable) {
  if (reinterpret_cast<uintptr_t>(global) % model::kRowBytes != 0) {
    throw model::Mistake("copy_16_bytes from an address that is not a multiple of 16");
  }
  model::Multiprocessor::current().copy(static_cast<char*>(shared), readable ? global : nullptr);
}

FASTATTN_DEVICE float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

FASTATTN_DEVICE char* shared_memory() { return model::Multiprocessor::current().shared().data(); }

template <class Element>
constexpr bool kHasTensorCores = true;
#if FASTATTN_MODEL_CAPABILITY < 80
template <>
constexpr bool kHasTensorCores<bf16> = false;
#endif

}  // namespace fastattn::cuda
