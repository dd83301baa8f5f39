// Rows of int8 and of float8_e4m3fn, made and read by the kernels in guarded memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "../../csrc/cpu/dispatch.h"
#include "../../csrc/cpu/run.h"
#include "complaints.h"
#include "for_each.h"
#include "tensor.h"

namespace fastattn::test {

// The number that a byte stands for.
inline double number_of(uint8_t byte, bool is_float8) {
  if (!is_float8) return int8_t(byte);
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte >> 7 ? -magnitude : magnitude;
}

// The rows of x as `quantize` makes them, each in memory of its own first; x becomes what they stand for.
class Quantized {
 public:
  Quantized(Placement placement, DType dtype, Array& x, bool is_float8)
      : x_(x),
        is_float8_(is_float8),
        bytes_(placement, x.B * x.H * x.N * x.D, 1),
        scales_(placement, x.B * x.H * x.N * int64_t(sizeof(float)), sizeof(float)) {
    const DecodeKernels& kernels = *choose_capability().kernels_for(DType::f32).decode;
    int64_t i = 0;
    each_row(x, [&](int64_t b, int64_t h, int64_t row) {
      Array one(1, 1, 1, x.D);
      std::copy_n(x.row(b, h, row), x.D, one.row(0, 0, 0));
      const Tensor from(placement, dtype, one);
      const Buffer to(placement, x.D, 1);
      const float scale = kernels.quantize(dtype, from.input().data, x.D, is_float8, to.data<int8_t>());
      if (!from.gaps_untouched() || !to.surroundings_untouched()) complain("bytes beside a quantized row were written");
      check(from.read().row(0, 0, 0), to.data<uint8_t>(), scale);
      std::copy_n(to.data<char>(), x.D, bytes_.data() + i * x.D);
      scales_.data<float>()[i++] = scale;
      for (int64_t d = 0; d < x.D; ++d) x.row(b, h, row)[d] = number_of(to.data<uint8_t>()[d], is_float8) * scale;
    });
  }

  Input input() const {
    Input rows{bytes_.data(), DType::i8, x_.H * x_.N * x_.D, x_.N * x_.D, x_.D};
    rows.is_float8 = is_float8_, rows.scales = scales_.data<float>();
    rows.batch_stride_of_scales = x_.H * x_.N, rows.head_stride_of_scales = x_.N, rows.row_stride_of_scales = 1;
    return rows;
  }

 private:
  // The largest element becomes the largest number, and no number is nearer to any element.
  void check(const double* from, const uint8_t* to, double scale) const {
    const double most = is_float8_ ? 448 : 127;
    double largest = 0;
    for (int64_t d = 0; d < x_.D; ++d) largest = std::fmax(largest, std::fabs(from[d]));
    if (std::fabs(scale * most - largest) > 1e-6 * largest) complain("the scale of a row is wrong");
    for (int64_t d = 0; d < x_.D; ++d) {
      const double x = largest == 0 ? 0 : from[d] / scale, off = std::fabs(number_of(to[d], is_float8_) - x);
      for (int byte = 0; byte < 256; ++byte) {
        const bool is_number = !is_float8_ || (byte & 0x7f) != 0x7f;
        if (is_number && std::fabs(number_of(uint8_t(byte), is_float8_) - x) < off - 1e-5 * std::fabs(x)) {
          return complain("an element is not rounded to the nearest number");
        }
      }
    }
  }

  const Array& x_;
  const bool is_float8_;
  const Buffer bytes_, scales_;
};

// Attention to quantized rows is that to what they stand for: one query, and as many as are computed in tiles.
inline void test_quantized(Placement placement) {
  constexpr int64_t B = 2, H = 4, H_kv = 2, n_k = 41;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool is_float8 : {false, true}) {
      for (const int64_t d : {1, 15, 16, 33}) {
        std::snprintf(current, sizeof current, "%s, %s of rows of %s, %lld columns, %s", choose_capability().name(),
                      is_float8 ? "float8" : "int8", name_of(dtype), static_cast<long long>(d), name_of(placement));
        Array k(B, H_kv, n_k, d), v(B, H_kv, n_k, d);
        for (Array* x : {&k, &v}) {
          int64_t i = 0;
          for (double& element : x->values) {
            element = std::sin(i * (x == &k ? 1.7 : 2.3)) * std::exp2(i / d % 9 - 4);
            ++i;
          }
          std::fill_n(x->row(1, 0, 3), d, 0.0);
        }
        const Quantized k8(placement, dtype, k, is_float8), v8(placement, dtype, v, is_float8);
        const Tensor k_of_floats(placement, DType::f32, k), v_of_floats(placement, DType::f32, v);
        for (const int64_t n_q : {1, 20}) {
          Array of_queries(B, H, n_q, d);
          for (size_t i = 0; i < of_queries.values.size(); ++i) of_queries.values[i] = std::cos(double(i));
          const Tensor q(placement, DType::f32, of_queries);
          std::vector<int32_t> tables[2];
          const auto all = [](int64_t) { return true; };
          const IndexList queries = index_list(n_q, tables[0], all), keys = index_list(n_k, tables[1], all);
          const std::vector<IndexList> of_q(B, queries), of_k(B, keys);
          const std::vector<int64_t> q_offset(B, 0);
          Params p{};
          p.B = B, p.H = H, p.H_kv = H_kv, p.n_q = n_q, p.n_k = n_k, p.d_qk = p.d_v = d;
          p.scale = 0.25, p.band = make_band(false, kNoLimit, kNoLimit), p.q_offset = q_offset.data();
          p.queries = of_q.data(), p.keys = of_k.data(), p.q = q.input();
          ForEach for_each(placement);
          const auto output = [&](const Input& of_keys, const Input& of_values) {
            p.k = of_keys, p.v = of_values;
            const Tensor o(placement, DType::f32, B, H, n_q, d), lse(placement, DType::f32, B, H, n_q, 1);
            run_forward(choose_capability(), p, {o.output(), lse.floats()}, 2, std::ref(for_each), std::ref(for_each));
            if (!for_each.kept_inside() || !o.gaps_untouched()) complain("a kernel wrote beside what is its own");
            return o.read();
          };
          const Array o = output(k8.input(), v8.input()), exact = output(k_of_floats.input(), v_of_floats.input());
          for (size_t i = 0; i < o.values.size(); ++i) {
            if (!(std::fabs(o.values[i] - exact.values[i]) < 2e-5))
              return complain("attention to quantized rows is wrong");
          }
        }
      }
    }
  }
}

}  // namespace fastattn::test
