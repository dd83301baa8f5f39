// The online softmax of FlashAttention-2 (Dao, 2023, algorithm 1), in base 2.
#pragma once

#include <cmath>

#include "../softmax.h"
#include "instructions.cuh"
#include "params.h"
#include "tile.cuh"

namespace fastattn::cuda {

// 2^x for weights that will be rounded to Element.
template <class Element>
FASTATTN_DEVICE float exp2_for(float x) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    return exp2f(x);
  } else {
    return exp2_fast(x);
  }
}

// Over the four lanes that hold a row of sums.
FASTATTN_DEVICE float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

FASTATTN_DEVICE float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// What the scores of a row with this maximum are multiplied by: on_score_log2, but less where an exponent, of which the
// rounded product of the maximum is subtracted, might be large. Scores that differ there do so by far more than what
// leaves a weight.
FASTATTN_DEVICE float factor_of_row(float max, float on_score_log2) {
  constexpr float kLargest = 0x1p28f;  // half a unit in its last place is 8, and 2^8 a number of every Element
  return fabsf(max) * on_score_log2 <= kLargest ? on_score_log2 : kLargest / fabsf(max);
}

// The statistics of a row of scores: their maximum, and the sum of 2^(score_log2 - max_log2). Weights relative to an
// older maximum are still to be multiplied by on_weights.
struct RowSum {
  float max, sum, on_weights;

  // The statistics with a sink, one more score whose value is zero. A row that sees no key does not see the sink.
  FASTATTN_DEVICE RowSum beside(float sink, float on_score_log2) const {
    if (sum == 0) return *this;
    const float new_max = fmaxf(max, sink), on_old = exp2f((max - new_max) * on_score_log2);
    return {new_max, sum * on_old + exp2f((sink - new_max) * on_score_log2), on_old};
  }
};

// The statistics of a row over several sets of keys, of which those of one after the other are added.
struct JoinedSums {
  float max = -kInfinity, sum = 0;

  // What the sums of values so far, and those of the set that is added, are to be multiplied by.
  struct Factors {
    float on_old, on_added;

    FASTATTN_DEVICE float2 joined(float2 old, float2 added) const {
      return {old.x * on_old + added.x * on_added, old.y * on_old + added.y * on_added};
    }
  };

  FASTATTN_DEVICE Factors add(float max_of_added, float sum_of_added, float on_score_log2) {
    const float new_max = fmaxf(max, max_of_added), from = finite_max(new_max);
    const Factors factors{exp2f((max - from) * on_score_log2), exp2f((max_of_added - from) * on_score_log2)};
    max = new_max;
    sum = sum * factors.on_old + sum_of_added * factors.on_added;
    return factors;
  }
};

// The running statistics of the rows of a warp: rows lane() / 4 and lane() / 4 + 8 of each block of 16.
template <class Element, int kRowBlocks>
struct OnlineSoftmax {
  float max[kRowBlocks][2];
  float sum[kRowBlocks][2];  // of 2^(score_log2 - max_log2), of the columns of this lane only; in 16 bits with headroom

  FASTATTN_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      max[i / 2][i % 2] = -kInfinity;
      sum[i / 2][i % 2] = 0;
    }
  }

  // Turns scores into weights with headroom, and makes o relative to the new maximum. The headroom is in the exponent,
  // but for fp32, which would notice that an exponent is rounded.
  template <int kColumnBlocks, int kBlocksOfO>
  FASTATTN_DEVICE void add(Sums (&scores)[kRowBlocks][kColumnBlocks], float on_score_log2, const Headroom& headroom,
                           Sums (&o)[kRowBlocks][kBlocksOfO]) {
    constexpr bool kInExponent = sizeof(Element) < sizeof(float);
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int r = i / 2, half = i % 2;
      float new_max = max[r][half];
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        new_max = fmaxf(new_max, fmaxf(scores[r][c][2 * half], scores[r][c][2 * half + 1]));
      }
      new_max = max_of_row(new_max);
      const float factor = factor_of_row(finite_max(new_max), on_score_log2);
      const float base_log2 = fmaf(finite_max(new_max), factor, kInExponent ? headroom.log2 : 0);
      const float rescale = exp2_for<Element>((max[r][half] - finite_max(new_max)) * on_score_log2);
      max[r][half] = new_max;
      sum[r][half] *= rescale;
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[r][c][e] = exp2_for<Element>(fmaf(scores[r][c][e], factor, -base_log2));
          sum[r][half] += scores[r][c][e];
          if (!kInExponent) scores[r][c][e] *= headroom.factor;
        }
      }
#pragma unroll
      for (int c = 0; c < kBlocksOfO; ++c) {
        o[r][c][2 * half] *= rescale;
        o[r][c][2 * half + 1] *= rescale;
      }
    }
  }

  // The sum of row i of this lane, of all columns and without the headroom.
  FASTATTN_DEVICE float whole_sum(int i, const Headroom& headroom) const {
    const float of_row = sum_of_row(sum[i / 2][i % 2]);
    return sizeof(Element) < sizeof(float) ? of_row * headroom.one_over_factor : of_row;
  }
};

}  // namespace fastattn::cuda
