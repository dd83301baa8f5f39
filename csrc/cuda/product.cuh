// The two products that attention is made of, by one warp: rows by rows, and weights by rows. 16-bit elements are
// multiplied by tensor cores, fp32 by fused multiply-adds in fp32.
//
//   forward   S = Q K^T                      O += P V
//   dq        S = Q K^T    dP = dO V^T       dQ += dS K
//   dk_dv     S = K Q^T    dP = V dO^T       dV += P dO,  dK += dS Q
#pragma once

#include <cmath>

#include "instructions.cuh"
#include "tile.cuh"

namespace fastattn::cuda {

// sums += x y^T, of the rows first_row, ... of x and the rows 0, ... of y.
template <int kRowBlocks, int kColumnBlocks, class Element, int kDepth>
FASTATTN_DEVICE void add_product(Sums (&sums)[kRowBlocks][kColumnBlocks], SharedTile<Element, kDepth> x, int first_row,
                                 SharedTile<Element, kDepth> y) {
  // A row's number alone is kept between calls; the places of its chunks would take too many registers.
  const int left_row = computed_anew(first_row + lane() % 16), right_row = computed_anew(lane() % 8 + lane() / 16 * 8);
#pragma unroll
  for (int depth = 0; depth < kDepth / 16; ++depth) {
    Left left[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      load_matrices(left[r], x.chunk(left_row + 16 * r, 2 * depth + lane() / 16));
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks; c += 2) {
      Right right[2];
      load_matrices(reinterpret_cast<Left&>(right), y.chunk(right_row + 8 * c, 2 * depth + lane() / 8 % 2));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        multiply_add<Element>(sums[r][c], left[r], right[0]);
        multiply_add<Element>(sums[r][c + 1], left[r], right[1]);
      }
    }
  }
}

// sums += weights x, of the rows 0, ... of x; the weights are rounded to Element.
template <int kRowBlocks, int kColumnBlocks, class Element, int kColumns>
FASTATTN_DEVICE void add_weighted(Sums (&sums)[kRowBlocks][kColumns / 8],
                                  const Sums (&weights)[kRowBlocks][kColumnBlocks], SharedTile<Element, kColumns> x) {
  const int right_row = computed_anew(lane() % 16);
#pragma unroll
  for (int depth = 0; depth < kColumnBlocks / 2; ++depth) {
    Left left[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights[r][2 * depth + i / 2][2 * (i % 2)];
        left[r][i] = pack<Element>(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns / 8; c += 2) {
      Right right[2];
      load_transposed(reinterpret_cast<Left&>(right), x.chunk(right_row + 16 * depth, c + lane() / 16));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        multiply_add<Element>(sums[r][c], left[r], right[0]);
        multiply_add<Element>(sums[r][c + 1], left[r], right[1]);
      }
    }
  }
}

template <int kRowBlocks, int kColumnBlocks, int kDepth>
FASTATTN_DEVICE void add_product(Sums (&sums)[kRowBlocks][kColumnBlocks], SharedTile<float, kDepth> x, int first_row,
                                 SharedTile<float, kDepth> y) {
  constexpr int kChunksOfPart = 8;  // a sum of 256 products in parts of 32 rounds less than half as much as in one go
#pragma unroll 1
  for (int first = 0; first < kDepth / 4; first += kChunksOfPart) {
    Sums part[kRowBlocks][kColumnBlocks] = {};
#pragma unroll 2
    for (int chunk = first; chunk < first + kChunksOfPart; ++chunk) {
      float4 left[kRowBlocks][2];
#pragma unroll
      for (int r = 0; r < 2 * kRowBlocks; ++r) {
        left[r / 2][r % 2] = *reinterpret_cast<const float4*>(x.chunk(first_row + 8 * r + lane() / 4, chunk));
      }
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 right = *reinterpret_cast<const float4*>(y.chunk(8 * c + 2 * (lane() % 4) + e, chunk));
#pragma unroll
          for (int r = 0; r < 2 * kRowBlocks; ++r) {
            const float4 row = left[r / 2][r % 2];
            float& sum = part[r / 2][c][2 * (r % 2) + e];
            sum = fmaf(row.x, right.x, fmaf(row.y, right.y, fmaf(row.z, right.z, fmaf(row.w, right.w, sum))));
          }
        }
      }
    }
    each([](float& sum, float of_part, int, int) { sum += of_part; }, sums, part);
  }
}

template <int kRowBlocks, int kColumnBlocks, int kColumns>
FASTATTN_DEVICE void add_weighted(Sums (&sums)[kRowBlocks][kColumns / 8],
                                  const Sums (&weights)[kRowBlocks][kColumnBlocks], SharedTile<float, kColumns> x) {
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
    for (int depth = 0; depth < 8; ++depth) {  // of the eight weights in these columns, a lane holds two
      float of_row[kRowBlocks][2];
#pragma unroll
      for (int r = 0; r < 2 * kRowBlocks; ++r) {
        const int holder = lane() / 4 * 4 + depth / 2;
        of_row[r / 2][r % 2] = __shfl_sync(~0u, weights[r / 2][c][2 * (r % 2) + depth % 2], holder);
      }
#pragma unroll
      for (int column = 0; column < kColumns / 8; ++column) {
        const int row = 8 * c + depth, at = 8 * column + 2 * (lane() % 4);
        const float2 pair = *reinterpret_cast<const float2*>(x.chunk(row, at / 4) + at % 4);
#pragma unroll
        for (int r = 0; r < 2 * kRowBlocks; ++r) {
          Sums& sum = sums[r / 2][column];
          sum[2 * (r % 2)] = fmaf(of_row[r / 2][r % 2], pair.x, sum[2 * (r % 2)]);
          sum[2 * (r % 2) + 1] = fmaf(of_row[r / 2][r % 2], pair.y, sum[2 * (r % 2) + 1]);
        }
      }
    }
  }
}

}  // namespace fastattn::cuda
