// The error budget of fastattn/testing.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "tensor.h"

namespace fastattn::test {

// What is wrong with `actual`; empty if max|actual - exact| <= 2 max|naive - exact| + 4 eps max|exact|, -inf stands
// where exact has it, and rows of which must_be_exact(b, h, i) are what they are in exact.
template <class MustBeExact>
std::string beyond_budget(const Array& actual, const Array& naive, const Array& exact, double eps,
                          MustBeExact must_be_exact) {
  double error = 0, naive_error = 0, magnitude = 0;
  each_row(exact, [&](int64_t b, int64_t h, int64_t i) {
    const bool exactly = must_be_exact(b, h, i);
    const double *a = actual.row(b, h, i), *n = naive.row(b, h, i), *e = exact.row(b, h, i);
    for (int64_t d = 0; d < exact.D; ++d) {
      if (std::isnan(a[d]) || std::isinf(e[d]) || exactly) {
        error = std::max(error, a[d] == e[d] ? 0 : HUGE_VAL);
        continue;
      }
      error = std::max(error, std::fabs(a[d] - e[d]));
      naive_error = std::max(naive_error, std::fabs(n[d] - e[d]));
      magnitude = std::max(magnitude, std::fabs(e[d]));
    }
  });
  const double budget = 2 * naive_error + 4 * eps * magnitude;
  if (error <= budget) return "";
  char text[100];
  std::snprintf(text, sizeof text, "max error %.3g, budget %.3g", error, budget);
  return text;
}

}  // namespace fastattn::test
