// The kernels without torch: right within the error budget of fastattn/testing.py, and no byte read or written that is
// not theirs. Every buffer lies beside a page that nobody may touch (guarded.h), and NaN stands in all padding.
//
//   kernels_test                     all of it, on the instruction set that FASTATTN_CPU_CAPABILITY allows
//   kernels_test heap                one placement of the buffers
//   kernels_test heap few            of some cases (kFewCases); or of the one of that name
//   kernels_test --instruction-sets  the names of those that this machine runs
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "../../csrc/cpu/dispatch.h"
#include "../../csrc/cpu/ranges.h"
#include "../../csrc/cpu/run.h"
#include "budget.h"
#include "complaints.h"
#include "for_each.h"
#include "formula.h"
#include "quantized.h"

namespace fastattn::test {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

// How a call is cut and what is asked for besides o and lse: none of it may change a bit of the results.
struct Request {
  const char* name;
  int64_t threads;
  bool dq, dkv, sums_of_ds, weights;
  bool in_pages = false;  // the keys that the forward reads

  bool wants(Array Results::* result) const {
    if (result == &Results::o || result == &Results::lse) return true;
    if (result == &Results::dq) return dq;
    if (result == &Results::dk || result == &Results::dv) return dkv;
    for (Array Results::* sum : {&Results::d_bias, &Results::d_column, &Results::d_row, &Results::d_slope}) {
      if (result == sum) return sums_of_ds;
    }
    return weights;
  }
};
constexpr Request kRequests[] = {
    {"everything, 1 thread", 1, true, true, true, true},
    {"everything, 64 threads", 64, true, true, true, true},
    {"dq", 1, true, false, false, false},
    {"dk and dv", 1, false, true, false, false},
    {"sums of dS, 64 threads", 64, false, false, true, false},
    {"pages", 2, false, false, false, false, true},
};

// Row lists whose tables lie in guarded memory too.
class RowLists {
 public:
  RowLists(Placement placement, const std::vector<std::vector<char>>& flags)
      : lists_(placement, int64_t(flags.size() * sizeof(IndexList)), alignof(IndexList)) {
    for (size_t b = 0; b < flags.size(); ++b) {
      std::vector<int32_t> table;
      IndexList list = index_list(int64_t(flags[b].size()), table, [&](int64_t i) { return flags[b][i] != 0; });
      tables_.push_back(std::make_unique<Buffer>(placement, int64_t(table.size() * sizeof(int32_t)), alignof(int32_t)));
      if (list.table) {
        std::copy(table.begin(), table.end(), tables_.back()->data<int32_t>());
        list.table = tables_.back()->data<int32_t>();
      }
      lists_.data<IndexList>()[b] = list;
    }
  }

  const IndexList* data() const { return lists_.data<IndexList>(); }

 private:
  Buffer lists_;
  std::vector<std::unique_ptr<Buffer>> tables_;
};

// What documents tell the kernels, as csrc/cpu/mask_tables.h computes it.
class Ranges {
 public:
  Ranges(const Inputs& in, Params& p) {
    const Case& c = in.about;
    if (c.documents_q.empty()) return;
    const auto ids = [](const std::vector<int64_t>& lengths, int64_t n) {
      std::vector<int64_t> result(n);
      for (int64_t i = 0; i < n; ++i) result[i] = 7 * Inputs::document_of(lengths, i).number;
      return result;
    };
    const std::vector<int64_t> ids_q = ids(c.documents_q, c.n_q), ids_k = ids(c.documents_k, c.n_k);
    const int64_t groups = (c.n_q + kRangeGroup - 1) / kRangeGroup;
    groups_.assign(c.B * groups, KeyRange{c.n_k, 0});
    for (std::vector<int32_t>* x : {&document_of_query_, &rank_of_query_}) x->resize(c.B * c.n_q);
    for (std::vector<int32_t>* x : {&document_of_key_, &rank_of_key_}) x->resize(c.B * c.n_k);
    for (int64_t b = 0; b < c.B; ++b) {
      DocumentsOfSample sample;
      sample.number(ids_k.data(), c.n_k, &document_of_key_[b * c.n_k], &rank_of_key_[b * c.n_k]);
      sample.number(ids_q.data(), c.n_q, &document_of_query_[b * c.n_q], &rank_of_query_[b * c.n_q]);
      sample.collect(&document_of_key_[b * c.n_k], &rank_of_key_[b * c.n_k], c.n_k);
      for (int64_t i = 0; i < c.n_q; ++i) {
        const int64_t position = rank_of_query_[b * c.n_q + i] + c.q_offset[b];
        ranges_.push_back(sample.visible(p.band, document_of_query_[b * c.n_q + i], position));
        KeyRange& of_group = groups_[b * groups + i / kRangeGroup];
        of_group = hull(of_group, {ranges_.back().begin, ranges_.back().end});
      }
    }
    for (int64_t b = 0; b < c.B; ++b) {
      isolated_runs_.push_back(isolated_runs_of(&ranges_[b * c.n_q], p.queries[b]));
      lists_.push_back({isolated_runs_.back().data(), int64_t(isolated_runs_.back().size())});
    }
    p.ranges = {ranges_.data(), groups_.data(), c.n_q, 0, groups, 0, kNoGaps};
    p.isolated_runs = lists_.data();
    p.documents = {document_of_query_.data(), document_of_key_.data(), rank_of_query_.data(), rank_of_key_.data()};
  }

 private:
  std::vector<RowRange> ranges_;
  std::vector<KeyRange> groups_;
  std::vector<std::vector<IsolatedRun>> isolated_runs_;
  std::vector<IsolatedRunList> lists_;
  std::vector<int32_t> document_of_query_, document_of_key_, rank_of_query_, rank_of_key_;
};

// Neither beside the scratch of the items nor beside the rows of these tensors was anything written.
void check_kept_inside(const ForEach& for_each, const std::vector<const Tensor*>& tensors) {
  if (!for_each.kept_inside()) complain("a kernel wrote beside its scratch");
  for (const Tensor* x : tensors) {
    if (!x->gaps_untouched()) complain("bytes beside the rows of a tensor were written");
  }
}

// Takes the rows of a tensor for pages, as long as they can be: those of a sample lie one after the other.
class Pages {
 public:
  Pages(Placement placement, const Tensor& x)
      : page_rows_(std::gcd(x.N, 16)),
        of_sample_(x.N / page_rows_),
        table_(placement, x.B * of_sample_ * int64_t(sizeof(int32_t)), alignof(int32_t)) {
    const Input rows = x.input();
    for (int64_t i = 0; i < x.B * of_sample_; ++i) {
      const int64_t row = i / of_sample_ * rows.batch_stride / rows.row_stride + i % of_sample_ * page_rows_;
      table_.data<int32_t>()[i] = static_cast<int32_t>(row / page_rows_);
    }
  }

  Input of(const Tensor& x) const {
    Input pages = x.input();
    pages.batch_stride = page_rows_ * pages.row_stride;
    pages.table = table_.data<int32_t>(), pages.pages_of_sample = of_sample_, pages.page_rows = page_rows_;
    return pages;
  }

 private:
  const int64_t page_rows_, of_sample_;
  const Buffer table_;
};

// Forward, backward and weights; what is not requested stays 0. The kernels sum dS for what is added to scores, and
// over the keys for sinks too.
Results run(const Inputs& in, DType dtype, Placement placement, const Request& request) {
  const Case& c = in.about;
  const Tensor q(placement, dtype, in.q, c.layout), k(placement, dtype, in.k, c.layout),
      v(placement, dtype, in.v, c.layout), d_o(placement, dtype, in.d_o, c.layout),
      d_lse(placement, DType::f32, in.d_lse);
  const Tensor o(placement, dtype, c.B, c.H, c.n_q, c.d_v, c.layout), lse(placement, DType::f32, c.B, c.H, c.n_q, 1);
  const Tensor dq(placement, DType::f32, c.B, c.H, c.n_q, c.d_qk, c.layout);
  const Tensor dk(placement, dtype, c.B, c.H_kv, c.n_k, c.d_qk, c.layout);
  const Tensor dv(placement, dtype, c.B, c.H_kv, c.n_k, c.d_v, c.layout);
  Results r(c);
  const Tensor d_bias(placement, DType::f32, r.d_bias), d_column(placement, DType::f32, r.d_column),
      d_row(placement, DType::f32, r.d_row), d_slope(placement, DType::f32, r.d_slope);  // 0, to be added to
  const RowLists queries(placement, in.real_queries), keys(placement, in.real_keys);
  const Buffer sinks(placement, c.H * int64_t(sizeof(float)), alignof(float));
  for (int64_t h = 0; h < c.H; ++h) sinks.data<float>()[h] = static_cast<float>(in.sink(h));
  const Tensor bias(placement, dtype, in.bias), d_weights(placement, dtype, in.d_weights);
  const Tensor delta_of_weights(placement, DType::f32, Array(c.B, c.H, c.n_q, 1));  // 0, to be added to
  const Buffer slopes(placement, c.B * c.H * int64_t(sizeof(float)), alignof(float));
  for (int64_t i = 0; i < c.B * c.H; ++i) slopes.data<float>()[i] = static_cast<float>(in.slope(i / c.H, i % c.H));
  const Buffer q_offset(placement, c.B * int64_t(sizeof(int64_t)), alignof(int64_t));
  std::copy(c.q_offset.begin(), c.q_offset.end(), q_offset.data<int64_t>());
  const Buffer places(placement, in.places.size() * sizeof(int32_t), alignof(int32_t));
  std::copy(in.places.begin(), in.places.end(), places.data<int32_t>());

  Params p{};
  p.B = c.B, p.H = c.H, p.H_kv = c.H_kv, p.n_q = c.n_q, p.n_k = c.n_k, p.d_qk = c.d_qk, p.d_v = c.d_v;
  p.scale = c.scale, p.softcap = c.softcap;
  if (!c.bias.empty()) p.bias = bias.table(), p.bias_dtype = dtype;
  if (c.by_distance) p.bias = p.bias.by_distance(c.n_q, bytes_of(dtype));
  if (c.alibi) p.alibi_slopes = slopes.data<float>();
  if (c.sink > -HUGE_VAL) p.sinks = sinks.data<float>();
  p.band = make_band(c.causal, c.left, c.right);
  p.q_offset = q_offset.data<int64_t>();
  p.queries = queries.data(), p.keys = keys.data();
  const Ranges ranges(in, p);
  p.q = q.input(), p.k = k.input(), p.v = v.input();
  p.dropout = make_dropout(c.dropout_p, kSeed);
  if (c.is_part) p.dropout.places = {places.data<int32_t>(), c.n_q};
  ForEach for_each(placement);
  {
    Params of_forward = p;
    std::optional<Pages> pages;
    if (request.in_pages && c.n_k > 0) {
      pages.emplace(placement, k);
      of_forward.k = pages->of(k), of_forward.v = pages->of(v);
    }
    run_forward(choose_capability(), of_forward, {o.output(), lse.floats()}, request.threads, std::ref(for_each),
                std::ref(for_each));
  }

  BackwardTensors t{};
  t.o = o.input(), t.lse = lse.floats();
  if (c.with_d_o) t.d_o = d_o.input();
  if (c.with_d_lse) t.d_lse = d_lse.floats();
  if (!c.d_weights.empty()) {
    t.d_weights = d_weights.table(), t.d_weights_dtype = dtype, t.delta_of_weights = delta_of_weights.floats();
  }
  if (request.dq) t.dq = dq.output();
  if (request.dkv) t.dk = dk.output(), t.dv = dv.output();
  if (request.sums_of_ds) t.d_row = d_row.floats();
  if (request.sums_of_ds && p.finishes_scores()) {
    const Output tables = d_bias.output();
    t.d_bias = {d_bias.floats(), d_bias.B < c.B ? 0 : tables.batch_stride, d_bias.H, tables.head_stride, c.n_k};
    if (c.by_distance) t.d_bias = t.d_bias.by_distance(c.n_q);
    t.d_column = d_column.floats(), t.d_slope = d_slope.floats();
  }
  run_backward(choose_capability(), p, t, request.threads, std::ref(for_each));

  check_kept_inside(for_each,
                    {&q, &k, &v, &d_o, &d_lse, &bias, &o, &lse, &dq, &dk, &dv, &d_bias, &d_column, &d_row, &d_slope});
  r.o = o.read(), r.lse = lse.read();
  if (request.dq) r.dq = dq.read();
  if (request.dkv) r.dk = dk.read(), r.dv = dv.read();
  r.d_bias = d_bias.read(), r.d_column = d_column.read(), r.d_row = d_row.read(), r.d_slope = d_slope.read();
  each_row(r.d_bias, [&](int64_t b, int64_t h, int64_t i) {
    if (!c.by_distance || i == 0) return;
    double* const lost = r.d_bias.row(b, h, i);
    for (int64_t j = 0; j < r.d_bias.D; ++j) r.d_bias.row(b, h, 0)[j] += lost[j], lost[j] = 0;
  });
  if (!request.weights) return r;

  const Tensor averaged(placement, dtype, c.B, 1, c.n_q, c.n_k), each_head(placement, dtype, c.B, c.H, c.n_q, c.n_k);
  const Tensor received(placement, DType::f32, c.B, c.H, 1, c.n_k),
      largest(placement, DType::f32, c.B, c.H, c.n_q, kTopK);
  const Buffer their_keys(placement, c.B * c.H * c.n_q * kTopK * int64_t(sizeof(int64_t)), alignof(int64_t));
  p.d_v = 0;
  const auto run_to = [&](const float* lse_or_null, const Tensor& to, bool average_heads) {
    run_weights(choose_capability(), p, lse_or_null, to.output(), average_heads, request.threads, std::ref(for_each));
  };
  run_to(lse.floats(), averaged, true);
  run_to(nullptr, each_head, false);
  run_received(choose_capability(), p, received.floats(), request.threads, std::ref(for_each));
  run_top_keys(choose_capability(), p, {largest.floats(), their_keys.data<int64_t>(), kTopK}, request.threads,
               std::ref(for_each));
  check_kept_inside(for_each, {&averaged, &each_head, &received, &largest});
  r.averaged = averaged.read(), r.each_head = each_head.read(), r.received = received.read(),
  r.largest = largest.read();
  std::copy_n(their_keys.data<int64_t>(), r.their_keys.values.size(), r.their_keys.values.begin());
  return r;
}

// Nothing but 0 stands in the rows that exact never added anything to.
void compare(const char* name, const Array& actual, const Array& naive, const Array& exact, double eps) {
  const auto all_zero = [&](int64_t b, int64_t h, int64_t i) {
    const double* row = exact.row(b, h, i);
    return std::all_of(row, row + exact.D, [](double x) { return x == 0; });
  };
  const std::string beyond = beyond_budget(actual, naive, exact, eps, all_zero);
  if (!beyond.empty()) complain(name + (": " + beyond));
}

// The keys of the largest weights have these weights, each key once, and -1 stands where a query sees too few.
void check_keys(const Inputs& in, const Results& actual, const Results& naive, const Results& exact) {
  const Case& c = in.about;
  Array of_their_keys(c.B, c.H, c.n_q, kTopK);
  each_row(actual.their_keys, [&](int64_t b, int64_t h, int64_t i) {
    const double* keys = actual.their_keys.row(b, h, i);
    int64_t seen = 0;
    for (int64_t j = 0; j < c.n_k; ++j) seen += in.sees(b, i, j);
    for (int64_t n = 0; n < kTopK; ++n) {
      const auto key = static_cast<int64_t>(keys[n]);
      const bool right =
          n < seen ? key >= 0 && key < c.n_k && in.sees(b, i, key) && std::count(keys, keys + n, key) == 0 : key == -1;
      if (!right) return complain("a key is hidden, or there twice, or missing");
      if (n < seen) of_their_keys.row(b, h, i)[n] = exact.p.row(b, h, i)[key];
    }
  });
  compare("weights of the keys", actual.largest, naive.largest, of_their_keys, eps_of(DType::f32));
}

void test_case(const Case& c, DType dtype, const std::vector<Placement>& placements) {
  const Inputs in(c, dtype);
  const Results exact = formula<double>(in, dtype), naive = formula<float>(in, dtype);
  for (const Placement placement : placements) {
    Results first(c);
    for (const Request& request : kRequests) {
      std::snprintf(current, sizeof current, "%s, %s, %s, %s, %s", choose_capability().name(), c.name, name_of(dtype),
                    name_of(placement), request.name);
      const Results actual = run(in, dtype, placement, request);
      if (request.in_pages) {  // a sum over keys is cut at their ends
        compare("o", actual.o, naive.o, exact.o, eps_of(dtype));
        compare("lse", actual.lse, naive.lse, exact.lse, eps_of(DType::f32));
        continue;
      }
      if (&request == kRequests) {
        first = actual;
        for (const auto& [name, array] : kResults) {
          const bool fp32 = array == &Results::lse || array == &Results::d_row || array == &Results::d_slope ||
                            array == &Results::received || array == &Results::largest;
          compare(name, actual.*array, naive.*array, exact.*array, eps_of(fp32 ? DType::f32 : dtype));
        }
        check_keys(in, actual, naive, exact);
      }
      const auto same_bits = [&](const char* name, Array Results::* array) {
        const bool same = (actual.*array).values == (first.*array).values;
        if (request.wants(array) && !same) complain(std::string("other ") + name + " than with " + kRequests[0].name);
      };
      for (const auto& [name, array] : kResults) same_bits(name, array);
      same_bits("keys", &Results::their_keys);
    }
  }
}

// Beside those that the CUDA kernels are tested with: what is added to scores.
// clang-format off
const std::vector<Case> kMoreCases = {
    {.name = "bias", .why = "entries of their own, heads that share keys",
     .H = 4, .n_q = 45, .n_k = 70, .causal = true, .q_offset = {30, 9}, .bias = {2, 4, 45, 70}},
    {.name = "bias-shared", .why = "samples and heads add to its gradient in turn, rows of padding",
     .H = 4, .n_q = 75, .n_k = 130, .keys = Padding::holes, .queries = Padding::holes, .bias = {1, 1, 75, 130}},
    {.name = "bias-of-keys", .why = "one row for all queries",
     .n_q = 50, .n_k = 300, .dropout_p = 0.3, .bias = {2, 1, 1, 300}},
    {.name = "bias-of-queries", .why = "one entry for all keys, against a sink",
     .n_q = 33, .n_k = 97, .left = 40, .right = 20, .sink = 0.5, .bias = {1, 2, 33, 1}},
    {.name = "bias-by-distance", .why = "one row for all queries, of which each begins elsewhere",
     .H = 4, .n_q = 75, .n_k = 130, .left = 60, .keys = Padding::holes, .queries = Padding::right, .bias = {1, 4, 1, 204},
     .by_distance = true},
    {.name = "bias-by-distance-documents", .why = "runs of queries add to one row, which all heads share",
     .n_q = 90, .n_k = 90, .documents_q = {40, 50}, .documents_k = {40, 50}, .bias = {1, 1, 1, 179}, .by_distance = true},
    {.name = "alibi", .why = "distances to both sides", .n_q = 90, .n_k = 130, .q_offset = {40, -7}, .alibi = true},
    {.name = "alibi-documents", .why = "distances in documents, beside all else",
     .B = 1, .H = 4, .H_kv = 2, .n_q = 90, .n_k = 90, .q_offset = {0}, .documents_q = {40, 50}, .documents_k = {40, 50},
     .softcap = 3, .sink = 0.5, .bias = {1, 4, 1, 90}, .alibi = true},
};
// clang-format on

// Those that together run every basic block of the kernels that all of them run, on AVX2: for tools under which each
// takes long.
// clang-format off
const std::set<std::string> kFewCases = {
    "smallest", "no-keys", "no-queries", "one-query", "decode-parts", "decode-in-place", "decode-half-vectors",
    "tails-below", "tails-above", "head-dim-200", "chunks", "causal-before", "window", "pad-keys-only", "strided",
    "token-by-token-strided", "documents-causal", "documents-of-other-lengths", "documents-holes", "documents-long",
    "dropout-window", "dropout-grouped", "dropout-part", "negative-scale", "softcap", "softcap-scale", "softcap-narrow",
    "softcap-decode", "sinks-decode", "sinks-far-above", "sinks-large-scores", "only-lse", "bias", "bias-shared",
    "bias-of-keys", "bias-by-distance", "alibi", "alibi-documents", "weights", "weights-averaged", "weights-received",
};
// clang-format on

int test_all(const std::vector<Placement>& placements, const std::string& wish) {
  watch_for_crashes();
  int cases = 0;
  for (const std::vector<Case>* table : {&kCases, &kMoreCases}) {
    for (const Case& c : *table) {
      if (!is_wished(c, wish, kFewCases)) continue;
      ++cases;
      for (const DType dtype : kDTypes) test_case(c, dtype, placements);
    }
  }
  for (const Placement placement : placements) test_quantized(placement);
  std::printf("%s: %d cases in fp32, bf16 and fp16, %d wrong\n", choose_capability().name(), cases, wrong);
  return wrong > 0 || cases == 0;
}

int print_instruction_sets() {
  for (const Capability& capability : capabilities()) {
    if (capability.runs_here) std::puts(capability.name());
  }
  return 0;
}

}  // namespace
}  // namespace fastattn::test

int main(int count, char** arguments) {
  using namespace fastattn::test;
  const std::string where = count > 1 ? arguments[1] : "", which = count > 2 ? arguments[2] : "";
  if (where == "--instruction-sets") return print_instruction_sets();
  std::vector<Placement> placements;
  for (const Placement placement : kPlacements) {
    if (where.empty() || where == name_of(placement)) placements.push_back(placement);
  }
  if (!placements.empty()) return test_all(placements, which);
  std::fprintf(stderr, "the placement must be before_guard, after_guard or heap, got '%s'\n", where.c_str());
  return 2;
}
