// The kernels of csrc/cuda on a model of a GPU: right within the error budget of fastattn/testing.py, no byte read or
// written that is not theirs, and the same bits in whatever order threads that do not wait for each other run. Every
// buffer lies beside a page that nobody may touch (guarded.h), and NaN stands in all padding.
//
//   kernels_test         all cases
//   kernels_test NAME    the cases of that name; `few` for some of them (kFewCases)
#include "../../../csrc/cuda/kernels.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "../../cpu_kernels/budget.h"
#include "../../cpu_kernels/complaints.h"
#include "../../cpu_kernels/formula.h"
#include "settings.h"

namespace fastattn::test {
namespace {

using cuda::model::Order;

// How a call is run and which gradients are asked for: none of it may change a bit of the results.
struct Request {
  const char* name;
  Placement placement;
  Order order;
  bool dq, dkv;
};
constexpr Request kRequests[] = {
#if defined(__SANITIZE_ADDRESS__)  // which watches the heap, and takes its time
    {"in order", Placement::heap, Order::ascending, true, true},
#else
    {"in order", Placement::before_guard, Order::ascending, true, true},
    {"in reverse", Placement::after_guard, Order::descending, true, true},
    {"dq at random", Placement::heap, Order::random, true, false},
    {"dk and dv at random", Placement::before_guard, Order::random, false, true},
#endif
};

constexpr int64_t kRowBytes = 16;  // that the kernels read or write at a time

int64_t padded(int64_t elements, DType dtype) {
  const int64_t in_row = kRowBytes / bytes_of(dtype);
  return (elements + in_row - 1) / in_row * in_row;
}

Layout padded(Layout layout, DType dtype) { return {layout.token_by_token, padded(layout.gap, dtype)}; }

// A tensor with columns of zeros, so that the kernels take it.
Tensor tensor(Placement placement, DType dtype, const Array& from, Layout layout) {
  Array wide(from.B, from.H, from.N, padded(from.D, dtype));
  each_row(from, [&](int64_t b, int64_t h, int64_t i) { std::copy_n(from.row(b, h, i), from.D, wide.row(b, h, i)); });
  return Tensor(placement, dtype, wide, padded(layout, dtype));
}

// One for the kernels to write such an array.
Tensor tensor_for(Placement placement, DType dtype, const Array& like, Layout layout) {
  return Tensor(placement, dtype, like.B, like.H, like.N, padded(like.D, dtype), padded(layout, dtype));
}

// Its first columns; the others are 0, where anything was written.
Array without_padding(const Tensor& tensor, const Array& like) {
  const Array wide = tensor.read();
  Array narrow = like;
  each_row(like, [&](int64_t b, int64_t h, int64_t i) {
    std::copy_n(wide.row(b, h, i), like.D, narrow.row(b, h, i));
    const bool zeros =
        std::all_of(wide.row(b, h, i) + like.D, wide.row(b, h, i) + wide.D, [](double x) { return x == 0; });
    if (!zeros) complain("columns that pad a row are not 0");
  });
  return narrow;
}

cuda::Rows rows(const Tensor& x) {
  const Output o = x.output();
  return {o.data, o.batch_stride, o.head_stride, o.row_stride};
}

// Values in guarded memory.
template <class T>
class Values {
 public:
  Values(Placement placement, int64_t n) : memory_(placement, n * int64_t(sizeof(T)), alignof(T)) {}

  template <class From>
  Values(Placement placement, const std::vector<From>& from) : Values(placement, int64_t(from.size())) {
    std::copy(from.begin(), from.end(), data());
  }

  T* data() const { return memory_.data<T>(); }
  bool kept_inside() const { return memory_.surroundings_untouched(); }

 private:
  Buffer memory_;
};

// The queries or the keys.
class Tokens {
 public:
  // `documents` are their lengths, or none; `offsets` is where the first token of each stands, in every sample.
  Tokens(Placement placement, const std::vector<std::vector<char>>& real, bool some_are_padding,
         const std::vector<int64_t>& documents, const std::vector<int64_t>& offsets)
      : real_(placement, flat(real)),
        documents_(placement,
                   of_tokens(real, documents, [](Inputs::Document of, int64_t, int64_t) { return 7 * of.number; })),
        positions_(placement, of_tokens(real, documents, [&](Inputs::Document of, int64_t b, int64_t i) {
                     return i - of.begin + offsets[b];
                   })) {
    side.n = int(real[0].size());
    const bool any = some_are_padding || !documents.empty();
    groups_ = std::make_unique<Values<cuda::Tokens>>(placement, any ? int64_t(real.size()) * side.group_count() : 0);
    if (any) side.groups = groups_->data();
    if (some_are_padding) side.real = real_.data();
    if (!documents.empty()) side.document = documents_.data(), side.position = positions_.data();
  }

  bool kept_inside() const {
    return real_.kept_inside() && documents_.kept_inside() && positions_.kept_inside() && groups_->kept_inside();
  }

  cuda::Side side{};

 private:
  template <class T>
  static std::vector<T> flat(const std::vector<std::vector<T>>& rows) {
    std::vector<T> all;
    for (const std::vector<T>& row : rows) all.insert(all.end(), row.begin(), row.end());
    return all;
  }

  // of(document, b, i) of each token; none where there are no documents.
  template <class Of>
  static std::vector<int64_t> of_tokens(const std::vector<std::vector<char>>& real,
                                        const std::vector<int64_t>& documents, Of of) {
    std::vector<int64_t> all;
    for (size_t b = 0; b < (documents.empty() ? 0 : real.size()); ++b) {
      for (size_t i = 0; i < real[b].size(); ++i) all.push_back(of(Inputs::document_of(documents, i), b, i));
    }
    return all;
  }

  Values<bool> real_;
  Values<int64_t> documents_, positions_;
  std::unique_ptr<Values<cuda::Tokens>> groups_;
};

// What the kernels gave, and what the launches said.
struct Launched {
  Results results;
  cudaError_t forward, backward;
};

// Forward and backward; gradients that are not requested stay 0.
Launched run(const Inputs& in, DType dtype, const Request& request) {
  const Case& c = in.about;
  const Placement placement = request.placement;
  Results r(c);
  const Array no_d_o(c.B, c.H, c.n_q, c.d_v);
  const Tensor q = tensor(placement, dtype, in.q, c.layout), k = tensor(placement, dtype, in.k, c.layout),
               v = tensor(placement, dtype, in.v, c.layout),
               d_o = tensor(placement, dtype, c.with_d_o ? in.d_o : no_d_o, c.layout);
  const Tensor o = tensor_for(placement, dtype, r.o, c.layout), dq = tensor_for(placement, dtype, r.dq, c.layout),
               dk = tensor_for(placement, dtype, r.dk, c.layout), dv = tensor_for(placement, dtype, r.dv, c.layout);
  const Tensor lse(placement, DType::f32, c.B, c.H, c.n_q, 1), d_lse(placement, DType::f32, in.d_lse);
  Tokens queries(placement, in.real_queries, c.queries != Padding::none, c.documents_q, c.q_offset);
  const Tokens keys(placement, in.real_keys, c.keys != Padding::none, c.documents_k, std::vector<int64_t>(c.B));
  const Values<int64_t> q_offset(placement, c.q_offset);
  queries.side.offsets = q_offset.data();
  const Values<int64_t> seed(placement, std::vector<int64_t>{kSeed});
  std::vector<float> sink_of_head(c.H);
  for (int64_t h = 0; h < c.H; ++h) sink_of_head[h] = static_cast<float>(in.sink(h));
  const Values<float> sinks(placement, sink_of_head);

  cuda::ForwardParams forward{};
  cuda::Params& p = forward.params;
  p.B = int(c.B), p.H = int(c.H), p.H_kv = int(c.H_kv), p.d_qk = int(q.D), p.d_v = int(v.D);
  p.dtype = dtype;
  p.queries = queries.side, p.keys = keys.side;
  p.band = make_band(c.causal, c.left, c.right);
  p.softcap = float(c.softcap);
  p.dropout = make_dropout(c.dropout_p, 0);
  p.seed = seed.data();
  if (c.sink > -HUGE_VAL) p.sinks = sinks.data();
  p.scale = float(c.scale);
  p.score_scale = p.is_general() ? ScoreScale{p.scale, float(kLog2E)} : split_scale(c.scale);
  p.q = rows(q), p.k = rows(k), p.v = rows(v);
  forward.headroom = cuda::Headroom::of(dtype, p.keys.n);
  forward.o = rows(o), forward.lse = lse.floats();

  const int64_t padded_queries = cuda::padded(int(c.n_q));
  const Values<float> stats(placement, c.B * c.H * cuda::kRowStats * padded_queries);
  cuda::BackwardParams backward{};
  backward.params = p;
  backward.o = rows(o), backward.d_o = rows(d_o);
  backward.lse = lse.floats(), backward.d_lse = c.with_d_lse ? d_lse.floats() : nullptr;
  backward.stats = {stats.data(), padded_queries};
  if (request.dq) backward.dq = rows(dq);
  if (request.dkv) backward.dk = rows(dk), backward.dv = rows(dv);

  cuda::model::settings.order = request.order;
  const cudaError_t of_forward =
      cuda::with_kernels_of(dtype, [&](auto kernels) { return kernels.forward(forward, nullptr); });
  const cudaError_t of_backward =
      cuda::with_kernels_of(dtype, [&](auto kernels) { return kernels.backward(backward, nullptr); });

  bool kept_inside = queries.kept_inside() && keys.kept_inside() && q_offset.kept_inside() && seed.kept_inside() &&
                     sinks.kept_inside() && stats.kept_inside();
  for (const Tensor* x : {&q, &k, &v, &d_o, &d_lse, &o, &lse, &dq, &dk, &dv}) {
    kept_inside = kept_inside && x->gaps_untouched();
  }
  if (!kept_inside) complain("bytes beside a tensor's rows were written");
  r.o = without_padding(o, r.o), r.lse = lse.read();
  if (request.dq) r.dq = without_padding(dq, r.dq);
  if (request.dkv) r.dk = without_padding(dk, r.dk), r.dv = without_padding(dv, r.dv);
  return {std::move(r), of_forward, of_backward};
}

// Whether nothing is added to a row of a result, [B, H or H_kv, n_q or n_k], which is 0 then or -inf.
class Untouched {
 public:
  explicit Untouched(const Inputs& in)
      : queries_(in.about.B, std::vector<char>(in.about.n_q, 1)),
        keys_(in.about.B, std::vector<char>(in.about.n_k, 1)) {
    for (int64_t b = 0; b < in.about.B; ++b) {
      for (int64_t i = 0; i < in.about.n_q; ++i) {
        for (int64_t j = 0; j < in.about.n_k; ++j) {
          if (in.sees(b, i, j)) queries_[b][i] = keys_[b][j] = 0;
        }
      }
    }
  }

  bool operator()(Array Results::* result, int64_t b, int64_t i) const {
    return result == &Results::dk || result == &Results::dv ? keys_[b][i] : queries_[b][i];
  }

 private:
  std::vector<std::vector<char>> queries_, keys_;
};

constexpr NamedResult kOfKernels[] = {
    {"o", &Results::o}, {"lse", &Results::lse}, {"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv},
};

bool same_bits(const std::vector<double>& x, const std::vector<double>& y) {
  return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                    [](double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); });
}

void test_case(const Case& c, DType dtype) {
  const Inputs in(c, dtype);
  const Results exact = formula<double>(in, dtype), naive = formula<float>(in, dtype);
  const Untouched untouched(in);
  Results first(c);
  for (const Request& request : kRequests) {
    std::snprintf(current, sizeof current, "%s, %s, %s", c.name, name_of(dtype), request.name);
    try {
      const auto [actual, of_forward, of_backward] = run(in, dtype, request);
      for (const cudaError_t error : {of_forward, of_backward}) {
        if (error != cudaSuccess) complain("the launch fails with error " + std::to_string(error));
      }
      if (&request == kRequests) {
        first = actual;
        for (const auto& [name, array] : kOfKernels) {
          const DType of_result = array == &Results::lse ? DType::f32 : dtype;
          const std::string beyond =
              beyond_budget(actual.*array, naive.*array, exact.*array, eps_of(of_result),
                            [&, array = array](int64_t b, int64_t, int64_t i) { return untouched(array, b, i); });
          if (!beyond.empty()) complain(name + (": " + beyond));
        }
      }
      for (const auto& [name, array] : kOfKernels) {
        const bool wanted =
            array == &Results::dq ? request.dq : array == &Results::o || array == &Results::lse || request.dkv;
        if (wanted && !same_bits((actual.*array).values, (first.*array).values)) {
          complain(std::string("other bits of ") + name + " than " + kRequests[0].name);
        }
      }
    } catch (const cuda::model::Mistake& mistake) {
      complain(mistake.what());
    }
  }
}

// A launch that is refused is told, and none follows it.
void test_refused_launches() {
  const Case c{.name = "refused", .why = "", .d_qk = 64, .d_v = 64};
  const Inputs in(c, DType::f16);
  const int64_t all = cuda::model::settings.shared_bytes;
  constexpr Request request{"refused", Placement::before_guard, Order::ascending, true, true};
  constexpr int64_t kForDkNotForDq = 36 << 10;
  for (const int64_t bytes : {int64_t(0), kForDkNotForDq}) {
    std::snprintf(current, sizeof current, "%d bytes of shared memory", int(bytes));
    cuda::model::settings.shared_bytes = bytes;
    const Launched launched = run(in, DType::f16, request);
    const bool untouched = std::all_of(launched.results.dk.values.begin(), launched.results.dk.values.end(),
                                       [](double x) { return std::isnan(x); });
    if ((launched.forward == cudaSuccess) != (bytes > 0)) complain("forward is refused where it fits, or is not");
    if (launched.backward == cudaSuccess || !untouched) complain("dk is computed though dq was refused");
  }
  cuda::model::settings.shared_bytes = all;
}

// Beside those that the CPU kernels are tested with: more tiles of the other side than the threads of a block find at a
// time, head dims around those that kernels are compiled for, and bands whose borders are those of tiles.
// clang-format off
const std::vector<Case> kMoreCases = {
    {.name = "many-tiles-of-keys", .why = "the next ones are found while a tile is multiplied",
     .B = 1, .H = 1, .H_kv = 1, .n_q = 20, .n_k = 600, .d_qk = 136, .d_v = 136, .causal = true, .q_offset = {580},
     .keys = Padding::holes},
    {.name = "many-tiles-of-queries", .why = "the same for a tile of keys",
     .B = 1, .H = 1, .H_kv = 1, .n_q = 600, .n_k = 20, .d_qk = 136, .d_v = 136, .q_offset = {0},
     .queries = Padding::holes},
    {.name = "many-samples", .why = "more groups of tokens than the threads of a block sum up",
     .B = 70, .H = 1, .H_kv = 1, .n_q = 33, .n_k = 40, .d_qk = 8, .d_v = 8, .q_offset = std::vector<int64_t>(70),
     .keys = Padding::holes, .queries = Padding::holes},
    {.name = "values-above-64", .why = "the wider of both head dims counts", .n_q = 20, .d_qk = 64, .d_v = 65},
    {.name = "keys-above-128", .why = "the same", .n_q = 20, .d_qk = 129, .d_v = 128},
    {.name = "last-query-not-first-key", .why = "a tile that one row does not see whole",
     .n_q = 128, .n_k = 128, .left = 62},
    {.name = "first-query-not-last-key", .why = "the same for a tile of keys", .n_q = 128, .n_k = 128, .right = 62},
    {.name = "last-query-next-key", .why = "a tile that one row sees, and that only",
     .n_q = 128, .n_k = 200, .causal = true, .q_offset = {1, 65}},
    {.name = "last-key-next-query", .why = "the same for a tile of keys", .n_q = 130, .n_k = 130, .left = 1},
};
// clang-format on

// Those that together run every basic block of the kernels that all of them run, on capability 8.0: for sanitizers, and
// for GPUs whose kernels differ little.
// clang-format off
const std::set<std::string> kFewCases = {
    "head-dim-200", "head-dim-128", "window-outside", "pad-whole-sample", "odd-strides", "documents-causal",
    "documents-dropout", "dropout-window", "zero-scale", "softcap-narrow", "sinks", "many-tiles-of-keys",
    "many-tiles-of-queries",
};
// clang-format on

bool takes(const Case& c) { return c.d_qk <= cuda::kMostColumns && c.d_v <= cuda::kMostColumns; }

int test_all(const std::string& wish) {
  watch_for_crashes();
  int cases = 0;
  for (const std::vector<Case>* some : {&kCases, &kMoreCases}) {
    for (const Case& c : *some) {
      if (!takes(c) || !is_wished(c, wish, kFewCases)) continue;
      ++cases;
      test_case(c, DType::f32);
      test_case(c, DType::f16);
      if (cuda::model::kCapability >= 80) test_case(c, DType::bf16);
    }
  }
  if (wish.empty() || wish == "few") test_refused_launches();
  const cuda::model::Counters& counted = cuda::model::counters;
  if (counted.load_conflicts + counted.copy_conflicts > 0) complain("there are bank conflicts");
  std::printf("kernels on a model of a GPU of capability %d.%d: %d cases, %d wrong\n", cuda::model::kCapability / 10,
              cuda::model::kCapability % 10, cases, wrong);
  const auto print = [](const char* name, int64_t n) { std::printf("  %-15s %10lld\n", name, (long long)n); };
  print("products", counted.products), print("loads", counted.loads), print("copies", counted.copies);
  print("bank conflicts", counted.load_conflicts + counted.copy_conflicts);
  print("barriers", counted.barriers), print("switches", counted.switches);
  return wrong > 0 || cases == 0;
}

}  // namespace
}  // namespace fastattn::test

int main(int count, char** arguments) {
  try {
    return fastattn::test::test_all(count > 1 ? arguments[1] : "");
  } catch (const fastattn::cuda::model::Mistake& mistake) {
    std::printf("%s: %s\n", fastattn::test::current, mistake.what());
    return 1;
  }
}
