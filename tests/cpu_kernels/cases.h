// What the kernels are tested with: shapes and masks, each with its reason, and their random inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../../csrc/dtype.h"
#include "../../csrc/mask.h"
#include "tensor.h"

namespace fastattn::test {

enum class Padding { none, right, holes, whole_sample };

struct Case {
  const char* name;
  const char* why;
  int64_t B = 2, H = 2, H_kv = 2;
  int64_t n_q = 40, n_k = 40, d_qk = 32, d_v = 32;
  bool causal = false;
  std::vector<int64_t> q_offset = {0, 0};  // [B]
  int64_t left = kNoLimit, right = kNoLimit;
  Padding keys = Padding::none, queries = Padding::none;
  std::vector<int64_t> documents_q = {}, documents_k = {};  // their lengths, in every sample; none: one document
  double dropout_p = 0, scale = 0.2;
  bool is_part = false;            // of another call, by whose counters dropout is drawn
  double softcap = 0;              // 0: none
  double sink = -HUGE_VAL;         // of head 0, one more for each head after it; -HUGE_VAL: none
  std::vector<int64_t> bias = {};  // its shape, [B or 1, H or 1, n_q or 1, n_k or 1]; empty: there is none
  bool by_distance = false;        // whether the bias is so, [1, H or 1, 1, n_q + n_k - 1]
  bool alibi = false;
  Layout layout = {};
  bool with_d_o = true, with_d_lse = true;
  std::vector<int64_t> d_weights = {};  // the shape of what arrives at the weights, as that of the bias

  bool finishes_scores() const { return softcap > 0 || !bias.empty() || alibi; }  // as Params has it

  // The samples and the heads of d_bias, if there is one. Heads that share a bias add to two tables by turns.
  int64_t d_bias_samples() const { return !finishes_scores() ? 0 : bias.empty() || by_distance ? B : bias[0]; }
  int64_t d_bias_heads() const { return bias.empty() || by_distance || bias[1] == H ? H : std::min<int64_t>(H, 2); }
  int64_t d_bias_rows() const { return by_distance ? 2 : n_q; }  // sums, and what rounding takes from them
  int64_t d_bias_columns() const { return by_distance ? n_q + n_k - 1 : n_k; }
};

// clang-format off
inline const std::vector<Case> kCases = {
    {.name = "plain", .why = "nothing special"},
    {.name = "smallest", .why = "one of everything",
     .B = 1, .H = 1, .H_kv = 1, .n_q = 1, .n_k = 1, .d_qk = 1, .d_v = 1, .q_offset = {0}},
    {.name = "no-keys", .why = "nothing to see", .n_q = 3, .n_k = 0},
    {.name = "no-queries", .why = "gradients of keys that nobody asks for", .n_q = 0, .n_k = 3},
    {.name = "one-query", .why = "decoding",
     .n_q = 1, .n_k = 300, .causal = true, .q_offset = {299, 120}, .keys = Padding::right},
    {.name = "decode-parts", .why = "keys split in parts, a group of heads, some queries are padding",
     .H = 22, .H_kv = 2, .n_q = 3, .n_k = 1300, .d_qk = 48, .d_v = 33, .q_offset = {1290, 700}, .left = 900,
     .keys = Padding::holes, .queries = Padding::holes},
    {.name = "decode-in-place", .why = "several chunks of keys and values that serve as they lie in memory, on pages too",
     .H = 10, .H_kv = 2, .n_q = 1, .n_k = 640, .d_qk = 64, .d_v = 96, .causal = true, .q_offset = {400, 639}},
    {.name = "decode-half-vectors", .why = "head dims that are whole vectors of fp32 but not of bf16, a negative scale",
     .B = 1, .H = 3, .H_kv = 1, .n_q = 1, .n_k = 320, .d_qk = 48, .d_v = 80, .q_offset = {319}, .scale = -0.2,
     .layout = {.gap = 1}},
    {.name = "one-key", .why = "weights of exactly 1", .n_q = 19, .n_k = 1},
    {.name = "tails-below", .why = "one less than blocks and tiles", .n_q = 63, .n_k = 95, .d_qk = 31, .d_v = 15},
    {.name = "tails-above", .why = "one more than blocks and tiles", .n_q = 33, .n_k = 97, .d_qk = 17, .d_v = 33},
    {.name = "head-dim-1", .why = "the narrowest rows", .d_qk = 1, .d_v = 1, .causal = true},
    {.name = "head-dim-3", .why = "rows shorter than any vector", .d_qk = 3, .d_v = 5, .layout = {.gap = 1}},
    {.name = "head-dim-200", .why = "a sum in parts, the last one short",
     .B = 1, .n_k = 70, .d_qk = 200, .d_v = 80, .q_offset = {0}},
    {.name = "chunks", .why = "dk and dv of more keys than stay in the cache",
     .B = 1, .H = 1, .H_kv = 1, .n_q = 20, .n_k = 230, .d_qk = 512, .d_v = 512, .q_offset = {0},
     .keys = Padding::holes},
    {.name = "head-dim-64", .why = "rows that serve as they lie in memory",
     .B = 1, .n_q = 130, .n_k = 150, .d_qk = 64, .d_v = 64, .causal = true, .q_offset = {20}},
    {.name = "head-dim-128", .why = "the same, but for the padded ones",
     .B = 1, .n_k = 130, .d_qk = 128, .d_v = 128, .q_offset = {0}, .keys = Padding::holes},
    {.name = "strips", .why = "more queries than take the keys together",
     .B = 1, .H = 4, .H_kv = 1, .n_q = 550, .n_k = 160, .d_qk = 16, .d_v = 16, .q_offset = {0}, .left = 430},
    {.name = "wide-values", .why = "d_v above d_qk", .d_qk = 16, .d_v = 50},
    {.name = "narrow-values", .why = "d_v below d_qk", .d_qk = 50, .d_v = 8},
    {.name = "causal", .why = "top-left causal over several blocks", .n_q = 130, .n_k = 130, .causal = true},
    {.name = "causal-before", .why = "the first queries stand before every key",
     .n_q = 70, .n_k = 33, .causal = true, .q_offset = {-37, -5}},
    {.name = "window", .why = "a window on both sides",
     .n_q = 100, .n_k = 210, .q_offset = {0, 40}, .left = 13, .right = 6},
    {.name = "window-zero", .why = "a query sees only itself", .left = 0, .right = 0},
    {.name = "window-outside", .why = "windows beyond the last key are empty",
     .n_k = 20, .q_offset = {10, 10}, .left = 3, .right = 3},
    {.name = "pad-right", .why = "lists without a table",
     .n_q = 45, .n_k = 120, .keys = Padding::right, .queries = Padding::right},
    {.name = "pad-holes", .why = "lists with a table, rows that are copied",
     .n_q = 75, .n_k = 120, .keys = Padding::holes, .queries = Padding::holes},
    {.name = "pad-whole-sample", .why = "a sample without a real row",
     .keys = Padding::whole_sample, .queries = Padding::whole_sample},
    {.name = "pad-keys-only", .why = "a sample without a real key", .keys = Padding::whole_sample},
    {.name = "pad-queries-only", .why = "zeros between computed rows", .queries = Padding::holes},
    {.name = "pad-holes-causal", .why = "all positions",
     .n_q = 70, .n_k = 70, .causal = true, .left = 20, .keys = Padding::holes, .queries = Padding::holes},
    {.name = "grouped", .why = "heads that share keys",
     .H = 6, .n_q = 50, .n_k = 60, .causal = true, .keys = Padding::holes},
    {.name = "multi-query", .why = "one head of keys for all", .H = 4, .H_kv = 1, .n_q = 35, .keys = Padding::right},
    {.name = "strided", .why = "gaps between rows",
     .n_q = 37, .n_k = 51, .d_qk = 33, .d_v = 20, .keys = Padding::right, .queries = Padding::right,
     .layout = {.gap = 3}},
    {.name = "odd-strides", .why = "rows of halves that begin between 32-bit words",
     .n_q = 64, .n_k = 64, .layout = {.gap = 1}},
    {.name = "token-by-token", .why = "as a projection leaves q, k and v",
     .n_k = 100, .d_qk = 40, .d_v = 24, .layout = {.token_by_token = true}},
    {.name = "token-by-token-strided", .why = "cut out of one tensor",
     .causal = true, .keys = Padding::holes, .layout = {.token_by_token = true, .gap = 7}},
    {.name = "documents", .why = "isolated runs of few keys, one that spans blocks of queries",
     .n_q = 164, .n_k = 164, .documents_q = {1, 23, 16, 33, 80, 11}, .documents_k = {1, 23, 16, 33, 80, 11}},
    {.name = "documents-causal", .why = "positions within documents, rows that are copied",
     .n_q = 90, .n_k = 90, .d_qk = 31, .d_v = 17, .causal = true, .documents_q = {40, 50}, .documents_k = {40, 50}},
    {.name = "documents-of-other-lengths", .why = "documents without a key or a query, heads that share keys",
     .H = 4, .n_q = 70, .n_k = 95, .documents_q = {20, 0, 35, 15}, .documents_k = {35, 10, 50, 0}},
    {.name = "documents-holes", .why = "isolated runs of lists with tables",
     .n_q = 120, .n_k = 120, .keys = Padding::holes, .queries = Padding::holes, .documents_q = {30, 60, 30},
     .documents_k = {30, 60, 30}},
    {.name = "documents-long", .why = "isolated runs of several blocks of keys, strips that end within one",
     .B = 1, .n_q = 560, .n_k = 560, .d_qk = 16, .d_v = 16, .q_offset = {0}, .left = 100, .right = 30,
     .documents_q = {9, 331, 20, 200}, .documents_k = {9, 331, 20, 200}},
    {.name = "documents-in-chunks", .why = "isolated runs cut by chunks of keys, and by items of few",
     .B = 1, .H = 1, .H_kv = 1, .n_q = 230, .n_k = 230, .d_qk = 512, .d_v = 512, .q_offset = {0},
     .documents_q = {71, 100, 59}, .documents_k = {71, 100, 59}},
    {.name = "documents-dropout", .why = "isolated runs that begin among four keys",
     .H = 4, .H_kv = 2, .n_q = 75, .n_k = 75, .documents_q = {5, 17, 53}, .documents_k = {5, 17, 53}, .dropout_p = 0.3},
    {.name = "dropout", .why = "dropped weights, odd numbers of keys", .n_q = 39, .n_k = 101, .dropout_p = 0.3},
    {.name = "dropout-window", .why = "blocks that begin among four keys",
     .n_q = 90, .n_k = 90, .left = 13, .right = 6, .keys = Padding::holes, .dropout_p = 0.5},
    {.name = "dropout-grouped", .why = "words by query head",
     .H = 4, .causal = true, .queries = Padding::holes, .dropout_p = 0.1},
    {.name = "dropout-part", .why = "words of another call",
     .H = 4, .H_kv = 2, .n_q = 39, .n_k = 101, .keys = Padding::holes, .dropout_p = 0.3, .is_part = true},
    {.name = "dropout-all", .why = "every weight dropped", .n_q = 20, .n_k = 20, .dropout_p = 1},
    {.name = "large-scores", .why = "an lse of thousands", .causal = true, .scale = 50},
    {.name = "zero-scale", .why = "all keys weigh the same", .keys = Padding::right, .scale = 0},
    {.name = "negative-scale", .why = "the least similar key wins", .scale = -0.3},
    {.name = "softcap", .why = "bounded scores, some at the bound",
     .n_q = 75, .n_k = 130, .causal = true, .q_offset = {50, 9}, .keys = Padding::holes, .softcap = 1.5},
    {.name = "softcap-scale", .why = "the sign of the scale, and tails of blocks",
     .n_q = 33, .n_k = 97, .d_qk = 17, .d_v = 33, .scale = -0.3, .softcap = 0.7},
    {.name = "softcap-wide", .why = "a bound that is out of reach", .n_q = 33, .n_k = 97, .softcap = 1e6},
    {.name = "softcap-narrow", .why = "scores that are all alike", .n_k = 70, .softcap = 1e-20},
    {.name = "softcap-decode", .why = "a bound beside dot products",
     .H = 4, .H_kv = 2, .n_q = 3, .n_k = 700, .d_qk = 48, .q_offset = {690, 300}, .left = 500, .keys = Padding::holes,
     .softcap = 2, .sink = 1},
    {.name = "sinks", .why = "one more score, rows that see nothing",
     .n_q = 75, .n_k = 90, .causal = true, .q_offset = {-9, 5}, .keys = Padding::holes, .queries = Padding::holes,
     .sink = 0.5},
    {.name = "sinks-decode", .why = "a sink joins the parts, not each of them",
     .H = 4, .H_kv = 2, .n_q = 2, .n_k = 1300, .causal = true, .q_offset = {1290, -1}, .keys = Padding::right,
     .sink = 3},
    {.name = "sinks-far-above", .why = "no weight is left", .n_k = 70, .sink = 1000},
    {.name = "sinks-far-below", .why = "a sink without weight", .n_k = 70, .sink = -1000},
    {.name = "sinks-large-scores", .why = "an lse of thousands that is refined", .causal = true, .scale = 50, .sink = 99},
    {.name = "only-o", .why = "no gradient arrives at lse, but the sink takes some", .causal = true, .sink = 0.5,
     .with_d_lse = false},
    {.name = "only-lse", .why = "no gradient arrives at o", .causal = true, .with_d_o = false},
    {.name = "weights", .why = "a gradient arrives at the weights of each pair",
     .n_q = 75, .n_k = 101, .q_offset = {9, -20}, .right = 30, .keys = Padding::holes, .queries = Padding::holes,
     .dropout_p = 0.3, .sink = 0.5, .d_weights = {2, 2, 75, 101}},
    {.name = "weights-averaged", .why = "the same for all heads, in isolated runs of few keys",
     .n_q = 90, .n_k = 90, .documents_q = {40, 50}, .documents_k = {40, 50}, .alibi = true, .with_d_o = false,
     .d_weights = {2, 1, 90, 90}},
    {.name = "weights-received", .why = "the same for all of a few queries",
     .H = 4, .n_q = 2, .n_k = 300, .q_offset = {299, 120}, .softcap = 2, .with_d_lse = false,
     .d_weights = {2, 4, 1, 300}},
};
// clang-format on

// wish: the name of a case, "few", which means those in `few`, or nothing, which means every case.
inline bool is_wished(const Case& c, const std::string& wish, const std::set<std::string>& few) {
  return wish.empty() || wish == c.name || (wish == "few" && few.contains(c.name));
}

constexpr int64_t kSeed = 0x1234567890abcdef;  // of dropout

// NaN stands in every row that nobody may read, and in what arrives at an lse of -inf or at the weight of a hidden key.
class Inputs {
  std::mt19937_64 random_{1};

 public:
  const Case& about;
  std::vector<std::vector<char>> real_queries, real_keys;  // [B][N], 0 or 1
  Array q, k, v, d_o, d_lse, bias, d_weights;
  std::vector<int32_t> places;  // as Spec.places

  Inputs(const Case& c, DType dtype)
      : about(c),
        real_queries(flags(c.queries, c.B, c.n_q)),
        real_keys(flags(c.keys, c.B, c.n_k)),
        q(normal(c.H, c.d_qk, dtype, real_queries)),
        k(normal(c.H_kv, c.d_qk, dtype, real_keys)),
        v(normal(c.H_kv, c.d_v, dtype, real_keys)),
        d_o(normal(c.H, c.d_v, dtype, real_queries)),
        d_lse(normal(c.H, 1, DType::f32, seeing_queries())),
        bias(normal(c.bias, dtype)),
        d_weights(normal(c.d_weights, dtype)),
        places(2 + c.n_q + (c.n_k + 3) / 4) {
    for (int32_t& place : places) place = random_() % 100;
    each_row(d_weights, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t j = 0; j < c.n_k && d_weights.N == c.n_q; ++j) {
        if (!sees(b, i, j)) d_weights.row(b, h, i)[j] = NAN;
      }
    });
  }

  double sink(int64_t h) const { return about.sink + h; }
  double slope(int64_t b, int64_t h) const { return std::ldexp(1.0, -1 - int(b + h)); }

  // The number of a document, and where it begins; a token alone is document 0.
  struct Document {
    int64_t number, begin;
  };
  static Document document_of(const std::vector<int64_t>& lengths, int64_t token) {
    Document document{0, 0};
    for (; document.number < int64_t(lengths.size()); ++document.number) {
      if (token < document.begin + lengths[document.number]) break;
      document.begin += lengths[document.number];
    }
    return document;
  }

  // From where the query stands in its document to where the key stands in its own.
  int64_t distance(int64_t b, int64_t query, int64_t key) const {
    const Document of_query = document_of(about.documents_q, query), of_key = document_of(about.documents_k, key);
    return key - of_key.begin - (query - of_query.begin + about.q_offset[b]);
  }

  bool sees(int64_t b, int64_t query, int64_t key) const {
    if (document_of(about.documents_q, query).number != document_of(about.documents_k, key).number) return false;
    const int64_t d = distance(b, query, key);
    const bool in_band = d >= -about.left && d <= about.right && !(about.causal && d > 0);
    return in_band && real_queries[b][query] && real_keys[b][key];
  }

 private:
  std::vector<std::vector<char>> flags(Padding padding, int64_t B, int64_t n) {
    std::vector<std::vector<char>> rows(B, std::vector<char>(n, 1));
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t i = 0; i < n; ++i) {
        if (padding == Padding::right) rows[b][i] = i < n * (b + 1) / (B + 1);
        if (padding == Padding::holes) rows[b][i] = random_() % 5 < 3;
        if (padding == Padding::whole_sample) rows[b][i] = b > 0;
      }
    }
    return rows;
  }

  std::vector<std::vector<char>> seeing_queries() const {
    std::vector<std::vector<char>> seeing(about.B, std::vector<char>(about.n_q));
    for (int64_t b = 0; b < about.B; ++b) {
      for (int64_t i = 0; i < about.n_q; ++i) {
        for (int64_t j = 0; j < about.n_k; ++j) seeing[b][i] |= sees(b, i, j);
      }
    }
    return seeing;
  }

  Array normal(int64_t heads, int64_t dim, DType dtype, const std::vector<std::vector<char>>& real) {
    std::normal_distribution<double> distribution;
    Array x(about.B, heads, real.empty() ? 0 : int64_t(real[0].size()), dim);
    each_row(x, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t d = 0; d < dim; ++d) x.row(b, h, i)[d] = real[b][i] ? rounded(distribution(random_), dtype) : NAN;
    });
    return x;
  }

  Array normal(const std::vector<int64_t>& shape, DType dtype) {
    if (shape.empty()) return Array(0, 0, 0, 0);
    std::normal_distribution<double> distribution;
    Array x(shape[0], shape[1], shape[2], shape[3]);
    for (double& value : x.values) value = rounded(distribution(random_), dtype);
    return x;
  }
};

}  // namespace fastattn::test
