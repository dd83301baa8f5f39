// The scalars of softmax in base 2, for host and device. Names ending in _log2 are in bits, lse is in nats.
#pragma once

#include <cmath>

#include "host_device.h"

namespace fastattn {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
constexpr float kInfinity = INFINITY;

// Beyond these a softcap changes nothing that fp32 can tell: scores are then all zero, or not bounded.
constexpr double kLeastSoftcap = 0x1p-100, kMostSoftcap = 0x1p100;

// score_log2 = on_score_log2 * ((on_query * q) . k), with on_score_log2 > 0, so that the maximum may be taken before
// the multiplication and a hidden score of -inf stays one. on_query is exact: the query is not rounded.
struct ScoreScale {
  float on_query;
  float on_score_log2;
};

FASTATTN_HD ScoreScale split_scale(double scale) {
  if (scale == 0) return {0.0f, 1.0f};
  return {scale > 0 ? 1.0f : -1.0f, float((scale > 0 ? scale : -scale) * kLog2E)};
}

// What the scores of a row with this maximum are measured from: a row that has seen nothing yet has no maximum.
FASTATTN_HD float finite_max(float max) { return max == -kInfinity ? 0.0f : max; }

// log(sum of exp(score)), given the maximum before its multiplication by on_score_log2, and log2 of the sum of
// 2^(score_log2 - max_log2): -inf where nothing was seen.
FASTATTN_HD double lse_of(float max, float on_score_log2, float log2_of_sum) {
  const double max_log2 = double(finite_max(max)) * on_score_log2;
  return kLn2 * (max_log2 + double(log2_of_sum));
}

// What a sink, one more score whose value is zero, makes of a row with this lse, in nats: the lse of both, and the
// share of the weights that is left for the keys. A row that saw nothing does not see the sink either.
struct BesideSink {
  double lse, share;
};

FASTATTN_HD BesideSink beside_sink(double lse, double sink) {
  if (lse == -kInfinity || sink == -kInfinity) return {lse, 1.0};
  const double above = sink - lse;
  const double both = above > 0 ? sink + std::log1p(std::exp(-above)) : lse + std::log1p(std::exp(above));
  return {both, 1 / (1 + std::exp(above))};
}

// The lse of a query, as two floats: a weight is 2^(on_score_log2 * (S - reference) - rest_log2).
struct Measure {
  float reference, rest_log2;

  // Of S + log2(sum) / on_score_log2, where S has a weight of 1 in the sum; {0, 0} where no key is seen.
  FASTATTN_HD static Measure of(double S, double sum, float on_score_log2) {
    if (sum == 0) return {0, 0};
    constexpr double kLargest = 0x1.fffffep127;  // with a scale of 1e-38 the exact value may lie beyond the floats
    const double more = std::log2(sum) / on_score_log2, exact = S + more;
    const auto reference = static_cast<float>(exact > kLargest ? kLargest : exact < -kLargest ? -kLargest : exact);
    return {reference, static_cast<float>((S - reference + more) * on_score_log2)};  // `exact` may have lost `more`
  }
};

// How many bits a number of keys has: that many of weights up to 2^-bits have a sum below 1.
FASTATTN_HD int bits_of(int64_t n_keys) {
  int bits = 0;
  for (; n_keys > 0; n_keys >>= 1) ++bits;
  return bits;
}

// A row that saw nothing has the output 0.
FASTATTN_HD float one_over_sum(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }

}  // namespace fastattn
