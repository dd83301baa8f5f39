// Attention, its gradients and its weights by the textbook, one query after the other: the twin of `formula` in
// fastattn/testing.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "../../csrc/dtype.h"
#include "../../csrc/philox.h"
#include "cases.h"
#include "tensor.h"

namespace fastattn::test {

constexpr int64_t kTopK = 5;

struct Results {
  Array o, lse, dq, dk, dv;
  Array d_bias, d_column, d_row, d_slope;  // sums of dS; all but d_row are 0 where there is only a product for a score
  Array averaged, each_head;               // weights after dropout, [B, 1 or H, n_q, n_k]
  Array received;                          // [B, H, 1, n_k]
  Array largest, their_keys;               // [B, H, n_q, kTopK]
  Array p;                                 // before dropout; by the formula only

  explicit Results(const Case& c)
      : o(c.B, c.H, c.n_q, c.d_v),
        lse(c.B, c.H, c.n_q, 1),
        dq(c.B, c.H, c.n_q, c.d_qk),
        dk(c.B, c.H_kv, c.n_k, c.d_qk),
        dv(c.B, c.H_kv, c.n_k, c.d_v),
        d_bias(c.d_bias_samples(), c.d_bias_heads(), c.d_bias_rows(), c.d_bias_columns()),
        d_column(c.B, c.H, 1, c.n_k),
        d_row(c.B, c.H, c.n_q, 1),
        d_slope(c.B, c.H, c.n_q, 1),
        averaged(c.B, 1, c.n_q, c.n_k),
        each_head(c.B, c.H, c.n_q, c.n_k),
        received(c.B, c.H, 1, c.n_k),
        largest(c.B, c.H, c.n_q, kTopK),
        their_keys(c.B, c.H, c.n_q, kTopK),
        p(c.B, c.H, c.n_q, c.n_k) {}
};

struct NamedResult {
  const char* name;
  Array Results::* array;
};
constexpr NamedResult kResults[] = {
    {"o", &Results::o},
    {"lse", &Results::lse},
    {"dq", &Results::dq},
    {"dk", &Results::dk},
    {"dv", &Results::dv},
    {"d_bias", &Results::d_bias},
    {"d_column", &Results::d_column},
    {"d_row", &Results::d_row},
    {"d_slope", &Results::d_slope},
    {"averaged weights", &Results::averaged},
    {"weights of each head", &Results::each_head},
    {"received", &Results::received},
    {"largest", &Results::largest},
};

// Sums are of type Real. Real = double: exact. Real = float: what a step leaves in memory is rounded to the dtype.
template <class Real>
Results formula(const Inputs& in, DType dtype) {
  const Case& c = in.about;
  const auto round = [&](Real x) -> Real {
    return std::is_same_v<Real, double> || dtype == DType::f32 ? x : static_cast<Real>(rounded(x, dtype));
  };
  const auto dot = [](const double* x, const double* y, int64_t n) {
    Real sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += Real(x[i]) * Real(y[i]);
    return sum;
  };
  const auto add_multiple = [](double* sum, Real factor, const double* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] = Real(sum[i]) + factor * Real(x[i]);
  };
  const auto round_row = [&](double* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = round(Real(x[i]));
  };
  const auto add = [](double& sum, Real x) { sum = Real(sum) + x; };
  const auto far = [&](int64_t b, int64_t i, int64_t j) { return round(Real(std::abs(in.distance(b, i, j)))); };
  const Dropout dropout = make_dropout(c.dropout_p, kSeed);
  const auto dropout_factor = [&](int64_t b, int64_t h, int64_t i, int64_t j) -> Real {
    PhiloxWords counter{uint32_t(j / 4), uint32_t(i), uint32_t(h), uint32_t(b)};
    if (c.is_part) {
      const auto place = [&](int64_t n) { return uint32_t(in.places[n]); };
      counter = {place(2 + c.n_q + j / 4), place(2 + i), uint32_t(h) + place(1), uint32_t(b) + place(0)};
    }
    const PhiloxWords words = philox(dropout.key, counter);
    const uint32_t word = j % 4 == 0 ? words.x0 : j % 4 == 1 ? words.x1 : j % 4 == 2 ? words.x2 : words.x3;
    if (c.dropout_p == 0) return 1;
    return c.dropout_p == 1 || word < c.dropout_p * 0x1p32 ? 0 : 1 / Real(1 - c.dropout_p);
  };

  Results r(c);
  each_row(in.q, [&](int64_t b, int64_t h, int64_t i) {
    std::vector<int64_t> keys;
    for (int64_t j = 0; j < c.n_k; ++j) {
      if (in.sees(b, i, j)) keys.push_back(j);
    }
    const int64_t h_kv = h / (c.H / c.H_kv);
    double* o = r.o.row(b, h, i);
    Real largest = -std::numeric_limits<Real>::infinity(), sum = 0;
    std::vector<Real> p, d_score;
    for (int64_t j : keys) {
      Real score = round(round(dot(in.q.row(b, h, i), in.k.row(b, h_kv, j), c.d_qk)) * Real(c.scale));
      if (c.softcap > 0) {
        const Real capped = round(std::tanh(round(score / Real(c.softcap))));
        d_score.push_back(round(1 - round(capped * capped)));
        score = round(capped * Real(c.softcap));
      }
      if (c.by_distance) {
        score = round(score + Real(in.bias.row(0, h % c.bias[1], 0)[c.n_q - 1 - i + j]));
      } else if (!c.bias.empty()) {
        score = round(score + Real(in.bias.row(b % c.bias[0], h % c.bias[1], i % c.bias[2])[j % c.bias[3]]));
      }
      if (c.alibi) score = round(score - round(Real(in.slope(b, h)) * far(b, i, j)));
      p.push_back(score);
      largest = std::max(largest, p.back());
    }
    const Real sink = Real(in.sink(h));
    if (!keys.empty()) largest = std::max(largest, sink);
    for (Real& x : p) sum += x = std::exp(x - largest);
    if (!keys.empty()) sum += std::exp(sink - largest);
    *r.lse.row(b, h, i) = round(largest + std::log(sum));
    if (keys.empty()) return;

    std::vector<Real> factors;
    for (size_t n = 0; n < keys.size(); ++n) {
      p[n] = round(p[n] / sum);
      factors.push_back(dropout_factor(b, h, i, keys[n]));
      add_multiple(o, round(p[n] * factors[n]), in.v.row(b, h_kv, keys[n]), c.d_v);
      r.p.row(b, h, i)[keys[n]] = p[n];
      r.each_head.row(b, h, i)[keys[n]] = round(p[n] * factors[n]);
      add(r.averaged.row(b, 0, i)[keys[n]], round(p[n] * factors[n]) / Real(c.H));
      add(r.received.row(b, h, 0)[keys[n]], p[n]);
    }
    round_row(o, c.d_v);
    std::vector<Real> sorted = p;
    std::sort(sorted.rbegin(), sorted.rend());
    std::copy_n(sorted.begin(), std::min<size_t>(kTopK, sorted.size()), r.largest.row(b, h, i));

    const auto d_weight = [&](int64_t j) -> Real {
      const auto& shape = c.d_weights;
      return shape.empty() ? 0 : Real(in.d_weights.row(b, h % shape[1], i % shape[2])[j]);
    };
    Real delta = c.with_d_o ? round(dot(in.d_o.row(b, h, i), o, c.d_v)) : 0;
    for (size_t n = 0; n < keys.size(); ++n) delta += round(p[n] * factors[n]) * d_weight(keys[n]);
    if (c.with_d_lse) delta -= Real(*in.d_lse.row(b, h, i));
    for (size_t n = 0; n < keys.size(); ++n) {
      const Real dp = c.with_d_o ? round(dot(in.d_o.row(b, h, i), in.v.row(b, h_kv, keys[n]), c.d_v)) : 0;
      Real ds = round(p[n] * round((dp + d_weight(keys[n])) * factors[n] - delta));
      add(*r.d_row.row(b, h, i), ds);
      if (c.finishes_scores()) {
        double* const d_bias = r.d_bias.row(b % r.d_bias.B, h % r.d_bias.H, c.by_distance ? 0 : i);
        add(d_bias[(c.by_distance ? c.n_q - 1 - i : 0) + keys[n]], ds);
        add(r.d_column.row(b, h, 0)[keys[n]], ds);
        add(*r.d_slope.row(b, h, i), round(ds * far(b, i, keys[n])));
      }
      if (c.softcap > 0) ds = round(ds * d_score[n]);
      ds = round(ds * Real(c.scale));
      add_multiple(r.dq.row(b, h, i), ds, in.k.row(b, h_kv, keys[n]), c.d_qk);
      add_multiple(r.dk.row(b, h_kv, keys[n]), ds, in.q.row(b, h, i), c.d_qk);
      if (c.with_d_o) {
        add_multiple(r.dv.row(b, h_kv, keys[n]), round(p[n] * factors[n]), in.d_o.row(b, h, i), c.d_v);
      }
    }
    round_row(r.dq.row(b, h, i), c.d_qk);
  });
  for (Array* x : {&r.averaged, &r.d_bias, &r.d_column}) {
    each_row(*x, [&](int64_t b, int64_t h, int64_t i) { round_row(x->row(b, h, i), x->D); });
  }
  each_row(r.dk, [&](int64_t b, int64_t h_kv, int64_t j) {
    round_row(r.dk.row(b, h_kv, j), c.d_qk);
    round_row(r.dv.row(b, h_kv, j), c.d_v);
  });
  return r;
}

}  // namespace fastattn::test
