// Arrays of doubles, and tensors: the same values rounded to a dtype, in guarded memory, in some layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../csrc/cpu/params.h"
#include "../../csrc/dtype.h"
#include "guarded.h"

namespace fastattn::test {

struct Format {
  int digits;           // of the significand, the hidden one included
  int lowest_exponent;  // of the normal numbers
};

inline Format format_of(DType dtype) {
  return dtype == DType::f32 ? Format{24, -126} : dtype == DType::bf16 ? Format{8, -126} : Format{11, -14};
}

inline double eps_of(DType dtype) { return std::ldexp(1.0, 1 - format_of(dtype).digits); }

// The nearest number of that dtype, ties to even. No value of these tests comes near the largest one.
inline double rounded(double x, DType dtype) {
  if (x == 0 || !std::isfinite(x)) return x;
  const Format format = format_of(dtype);
  const double last_place = std::ldexp(1.0, std::max(std::ilogb(x), format.lowest_exponent) - format.digits + 1);
  return std::nearbyint(x / last_place) * last_place;
}

// [B, H, N, D], dense.
struct Array {
  int64_t B, H, N, D;
  std::vector<double> values;

  Array(int64_t B, int64_t H, int64_t N, int64_t D) : B(B), H(H), N(N), D(D), values(B * H * N * D) {}

  double* row(int64_t b, int64_t h, int64_t i) { return values.data() + ((b * H + h) * N + i) * D; }
  const double* row(int64_t b, int64_t h, int64_t i) const { return const_cast<Array*>(this)->row(b, h, i); }
};

// visit(b, h, i) for all rows of a tensor or an array.
template <class Rows, class Visit>
void each_row(const Rows& x, Visit visit) {
  for (int64_t b = 0; b < x.B; ++b) {
    for (int64_t h = 0; h < x.H; ++h) {
      for (int64_t i = 0; i < x.N; ++i) visit(b, h, i);
    }
  }
}

// Rows that follow each other head by head, or token by token, each followed by a gap that belongs to nobody.
struct Layout {
  bool token_by_token = false;
  int64_t gap = 0;  // in elements
};

class Tensor {
 public:
  const DType dtype;
  const int64_t B, H, N, D;

  Tensor(Placement placement, DType dtype, int64_t B, int64_t H, int64_t N, int64_t D, Layout layout = {})
      : dtype(dtype),
        B(B),
        H(H),
        N(N),
        D(D),
        row_stride_((layout.token_by_token ? H : 1) * (D + layout.gap)),
        head_stride_((layout.token_by_token ? 1 : N) * (D + layout.gap)),
        batch_stride_(H * N * (D + layout.gap)),
        memory_(placement, B * H * N == 0 ? 0 : (place(B - 1, H - 1, N - 1) + D) * bytes_of(dtype), bytes_of(dtype)) {}

  Tensor(Placement placement, DType dtype, const Array& from, Layout layout = {})
      : Tensor(placement, dtype, from.B, from.H, from.N, from.D, layout) {
    each_row(from, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t d = 0; d < D; ++d) write(place(b, h, i) + d, from.row(b, h, i)[d]);
    });
  }

  Array read() const {
    Array x(B, H, N, D);
    each_row(x, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t d = 0; d < D; ++d) x.row(b, h, i)[d] = read(place(b, h, i) + d);
    });
    return x;
  }

  Input input() const { return {memory_.data(), dtype, batch_stride_, head_stride_, row_stride_}; }
  Output output() const { return {memory_.data(), dtype, batch_stride_, head_stride_, row_stride_}; }
  // One entry of it serves all samples, heads, queries or keys where it has no more of them.
  Table table() const {
    const auto bytes = [&](int64_t n, int64_t stride) { return n > 1 ? stride * bytes_of(dtype) : 0; };
    return {memory_.data(), bytes(B, batch_stride_), bytes(H, head_stride_), bytes(N, row_stride_), D == 1};
  }
  float* floats() const { return memory_.data<float>(); }

  // Nothing was written but rows.
  bool gaps_untouched() const {
    std::vector<bool> in_a_row(memory_.size() / bytes_of(dtype));
    each_row(*this, [&](int64_t b, int64_t h, int64_t i) { std::fill_n(in_a_row.begin() + place(b, h, i), D, true); });
    for (int64_t i = 0; i < int64_t(in_a_row.size()); ++i) {
      if (!in_a_row[i] && !memory_.untouched(i * bytes_of(dtype), (i + 1) * bytes_of(dtype))) return false;
    }
    return memory_.surroundings_untouched();
  }

 private:
  int64_t place(int64_t b, int64_t h, int64_t i) const {
    return b * batch_stride_ + h * head_stride_ + i * row_stride_;
  }

  void write(int64_t i, double x) {
    if (dtype == DType::f32) {
      memory_.data<float>()[i] = static_cast<float>(x);
    } else {
      memory_.data<uint16_t>()[i] = half_bits(rounded(x, dtype), format_of(dtype));
    }
  }

  double read(int64_t i) const {
    if (dtype == DType::f32) return memory_.data<float>()[i];
    return half_value(memory_.data<uint16_t>()[i], format_of(dtype));
  }

  // sign, exponent, fraction, as IEEE 754 lays them out in 16 bits; x is a number of that format.
  static uint16_t half_bits(double x, Format format) {
    const int fraction_bits = format.digits - 1;
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (!std::isfinite(x)) return sign | 0x7fff >> fraction_bits << fraction_bits | (std::isnan(x) ? 1 : 0);
    const int exponent = x == 0 ? format.lowest_exponent : std::max(std::ilogb(x), format.lowest_exponent);
    const int significand = static_cast<int>(std::ldexp(std::fabs(x), fraction_bits - exponent));
    // The hidden digit of a normal number carries into the exponent, whose lowest value stands for 1 and for 0 too.
    return static_cast<uint16_t>(sign | (((exponent - format.lowest_exponent) << fraction_bits) + significand));
  }

  static double half_value(uint16_t bits, Format format) {
    const int fraction_bits = format.digits - 1;
    const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    double magnitude = std::ldexp(fraction, format.lowest_exponent - fraction_bits);
    if (exponent == 0x7fff >> fraction_bits) {
      magnitude = fraction == 0 ? HUGE_VAL : NAN;
    } else if (exponent > 0) {
      magnitude = std::ldexp(fraction + (1 << fraction_bits), exponent - 1 + format.lowest_exponent - fraction_bits);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
  }

  int64_t row_stride_, head_stride_, batch_stride_;
  Buffer memory_;
};

}  // namespace fastattn::test
