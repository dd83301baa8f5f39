// Rules of matrix instructions of a warp: PTX ISA 9.7.14.5 mma.sync, ldmatrix and stmatrix.
#pragma once

#include "half.h"
#include "movement.h"

namespace ptx {

enum Element { kF16, kBF16, kTF32 };

inline float value_of(Element element, uint32_t bits) {
  if (element == kTF32) return std::bit_cast<float>(bits & ~0x1fffu);  // the low bits are ignored
  return element == kF16 ? float_of_f16(uint16_t(bits)) : float_of_bf16(uint16_t(bits));
}

// How tensor cores add: the sum before and the products of `at_once` elements together, each cut off below the last of
// 24 bits and `spare` more of the largest; and the result cut off after 24 bits. Source: Khattak and Mikaitis, Accurate
// Models of NVIDIA Tensor Cores, 2025.
struct Adder {
  int at_once, spare;

  Adder(int arch, Element element)
      : at_once(arch < 80   ? 4
                : arch < 90 ? 8
                            : 16),
        spare(arch < 80   ? 0
              : arch < 90 ? 1
                          : 2) {
    if (element == kTF32) at_once /= 2;
  }
};

// Exponent of a float; of 0 a very small one, of what is not finite 128.
inline int exponent_of(float x) {
  const int bits = std::bit_cast<int>(x) >> 23 & 0xff;
  return x == 0 ? -1000 : bits - 127;
}

// Adds a row of A times K rows of B, of which the first n columns count.
template <int kColumns>
void add_products(const float* a, const float (*b)[kColumns], float* c, int n, int K, Adder adder) {
  double sums[kColumns], unit[kColumns];
  int largest[kColumns];
  for (int first = 0; first < K; first += adder.at_once) {
    const int end = std::min(first + adder.at_once, K);
    for (int i = 0; i < n; i++) largest[i] = exponent_of(c[i]);
    for (int k = first; k < end; k++) {
      const int of_a = exponent_of(a[k]);
      for (int i = 0; i < n; i++) largest[i] = std::max(largest[i], of_a + exponent_of(b[k][i]));
    }
    for (int i = 0; i < n; i++) {
      const int exponent = std::max(largest[i], -300) - 23 - adder.spare;
      unit[i] = std::bit_cast<double>(uint64_t(1023 - exponent) << 52);  // one over the last bit that counts
      sums[i] = std::trunc(c[i] * unit[i]);
    }
    for (int k = first; k < end; k++) {
      for (int i = 0; i < n; i++) sums[i] += std::trunc(double(a[k]) * double(b[k][i]) * unit[i]);
    }
    for (int i = 0; i < n; i++) {
      const uint64_t bits = std::bit_cast<uint64_t>(sums[i] / unit[i]) & ~((1ull << 29) - 1);  // those of a float
      c[i] = float(std::bit_cast<double>(bits));
    }
  }
}

// 9.7.14.5.8 mma.m16n8k16 with 16 bits, 9.7.14.5.7 mma.m16n8k8 with these and TF32: D = A B + C, summed in fp32 in the
// order of k. a: the Element, b: k. Lane 4 g + t holds of A and C the rows g and g + 8, of B and C the columns g, and
// 2 t, 2 t + 1.
inline bool multiply(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const Element element = Element(x.rule->a);
  const int K = x.rule->b, per_word = element == kTF32 ? 1 : 2,
            in_words = 4 * per_word;  // elements; of four lanes' words
  const int words_of_b = K / in_words, words_of_a = 2 * words_of_b;
  float a[16][16], b[16][8], c[16][8];
  const Operand* operands = x.operands.data();
  for (int r = 0; r < words_of_a; r++) {
    const uint32_t* words = warp.read<uint32_t>(operands[4 + r], lanes);
    for (int i = 0; i < kLanes; i++) {
      for (int e = 0; e < per_word; e++) {
        a[i / 4 + 8 * (r % 2)][per_word * (i % 4) + in_words * (r / 2) + e] = value_of(element, words[i] >> 16 * e);
      }
    }
  }
  for (int r = 0; r < words_of_b; r++) {
    const uint32_t* words = warp.read<uint32_t>(operands[4 + words_of_a + r], lanes);
    for (int i = 0; i < kLanes; i++) {
      for (int e = 0; e < per_word; e++)
        b[per_word * (i % 4) + in_words * r + e][i / 4] = value_of(element, words[i] >> 16 * e);
    }
  }
  for (int r = 0; r < 4; r++) {
    const float* values = warp.read<float>(operands[4 + words_of_a + words_of_b + r], lanes);
    for (int i = 0; i < kLanes; i++) c[i / 4 + 8 * (r / 2)][2 * (i % 4) + r % 2] = values[i];
  }
  const Adder adder(warp.block.program.arch, element);
  for (int i = 0; i < 16; i++) add_products(a[i], b, c[i], 8, K, adder);
  for (int r = 0; r < 4; r++) {
    float values[kLanes];
    for (int i = 0; i < kLanes; i++) values[i] = c[i / 4 + 8 * (r / 2)][2 * (i % 4) + r % 2];
    warp.write(operands[r], lanes, values);
  }
  return true;
}

// Rows of 8 x 8 matrices of 16 bits in shared memory: those of matrix m are at the addresses of the lanes 8 m to 8 m
// + 7.
struct Rows {
  std::array<uint64_t, kLanes> at;
  Lanes lanes;
  Rows(Warp& warp, const Operand& address, int matrices) : lanes(matrices == 4 ? kAllLanes : (1u << 8 * matrices) - 1) {
    at = Access(warp, address, lanes, kShared, 16, 16).at;
  }
};

// 9.7.14.5.15 ldmatrix and 9.7.14.5.16 stmatrix; a: how many matrices, b: whether they are transposed.
inline bool load_matrices(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const Rows rows(warp, x.operands.back(), x.rule->a);
  uint16_t data[kLanes][8];
  each(warp, rows.lanes, [&](int i) { read_shared(warp, rows.at[i], 16, data[i]); });
  for (int m = 0; m < x.rule->a; m++) {
    uint32_t words[kLanes];
    for (int i = 0; i < kLanes; i++) {
      const int row = 8 * m + i / 4, column = 2 * (i % 4), from = 8 * m + 2 * (i % 4);
      words[i] =
          x.rule->b ? data[from][i / 4] | data[from + 1][i / 4] << 16 : data[row][column] | data[row][column + 1] << 16;
    }
    warp.write(x.operands[m], lanes, words);
  }
  return true;
}
inline bool store_matrices(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const Rows rows(warp, x.operands[0], x.rule->a);
  uint16_t data[kLanes][8];
  for (int m = 0; m < x.rule->a; m++) {
    const uint32_t* words = warp.read<uint32_t>(x.operands[m + 1], lanes);
    for (int i = 0; i < kLanes; i++) {
      for (int e = 0; e < 2; e++) {
        const int row = i / 4, column = 2 * (i % 4) + e;
        (x.rule->b ? data[8 * m + column][row] : data[8 * m + row][column]) = uint16_t(words[i] >> 16 * e);
      }
    }
  }
  each(warp, rows.lanes, [&](int i) { write_shared(warp, rows.at[i], 16, data[i]); });
  return true;
}

inline void add_matrices(Rules& rules) {
  const std::string sums = "4d32 4s32 2s32 4s32";
  rules["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] = {sums, multiply, kF16, 16};
  rules["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = {sums, multiply, kBF16, 16};
  rules["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] = {sums, multiply, kTF32, 8};
  rules["mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"] = {"4d32 2s32 1s32 4s32", multiply, kF16, 8};
  for (const int n : {1, 2, 4}) {
    for (const bool transposed : {false, true}) {
      const std::string count = std::to_string(n), end = ".x" + count + (transposed ? ".trans" : "") + ".shared.b16";
      rules["ldmatrix.sync.aligned.m8n8" + end] = {count + "d32 a", load_matrices, n, transposed};
      rules["stmatrix.sync.aligned.m8n8" + end] = {"a " + count + "s32", store_matrices, n, transposed};
    }
  }
}

}  // namespace ptx
