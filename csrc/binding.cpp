// The module fastattn._native_cpu: plain functions over tensors. fastattn/backends/native calls them, and allocates
// what they write; fastattn/ops.py is where PyTorch is told.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/run.h"

namespace fastattn {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "tensors must be float32, bfloat16 or float16, got ", x.scalar_type());
  }
}

template <class Rows>
Rows rows_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1),
                    "tensors must be [B, H, N, D] on the CPU with a last stride of 1, got shape ", x.sizes(),
                    ", strides ", x.strides(), " on ", x.device());
  return {static_cast<decltype(Rows::data)>(x.data_ptr()), dtype_of(x), x.stride(0), x.stride(1), x.stride(2)};
}

const float* floats_or_null(const MaybeTensor& x) { return x ? x->const_data_ptr<float>() : nullptr; }

// The rows of every batch entry that are not padding.
class RealRows {
 public:
  RealRows(const MaybeTensor& flags, int64_t B, int64_t n) : tables_(B), lists_(B, IndexList{nullptr, 0, n}) {
    if (!flags) return;
    const Tensor contiguous = flags->contiguous();
    TORCH_CHECK_VALUE(contiguous.dim() == 2 && contiguous.size(0) == B && contiguous.size(1) == n,
                      "real_queries and real_keys must be [", B, ", ", n, "], got ", contiguous.sizes());
    const bool* row = contiguous.const_data_ptr<bool>();
    for (int64_t b = 0; b < B; ++b) lists_[b] = index_list(row + b * n, n, tables_[b]);
  }

  const IndexList* lists() const { return lists_.data(); }

 private:
  std::vector<std::vector<int32_t>> tables_;
  std::vector<IndexList> lists_;
};

// Mask of fastattn/spec.py, in the form that the kernels take.
struct Mask {
  Band band;
  std::vector<int64_t> q_start;
  RealRows queries, keys;
  int64_t n_q, n_k;

  Mask(int64_t B, int64_t n_q, int64_t n_k, bool causal, std::optional<int64_t> left, std::optional<int64_t> right,
       std::vector<int64_t> q_start, const MaybeTensor& real_queries, const MaybeTensor& real_keys)
      : band(make_band(causal, left.value_or(kNoLimit), right.value_or(kNoLimit))),
        q_start(std::move(q_start)),
        queries(real_queries, B, n_q),
        keys(real_keys, B, n_k),
        n_q(n_q),
        n_k(n_k) {
    TORCH_CHECK_VALUE(int64_t(this->q_start.size()) == B, "q_start must have ", B, " entries");
  }
};

Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Mask& mask,
                   const Dropout& dropout) {
  Problem p{};
  p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1);
  p.n_q = q.size(2), p.n_k = k.size(2), p.d_qk = q.size(3), p.d_v = v.size(3);
  TORCH_CHECK_VALUE(p.n_q == mask.n_q && p.n_k == mask.n_k && p.B == int64_t(mask.q_start.size()),
                    "the mask is for other sizes than q and k");
  p.scale = scale;
  p.band = mask.band;
  p.q_start = mask.q_start.data();
  p.queries = mask.queries.lists();
  p.keys = mask.keys.lists();
  p.q = rows_of<Input>(q), p.k = rows_of<Input>(k), p.v = rows_of<Input>(v);
  p.dropout = dropout;
  return p;
}

// run(i, scratch) for all i < n; a thread takes the next one when it is free, since items differ in length.
template <class Run>
void take_in_turn(int64_t n, int64_t scratch_floats, Run run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n);
  const Tensor scratch = at::empty({threads, scratch_floats}, at::kFloat);  // rows begin at cache lines, see Arena
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    float* own = scratch.data_ptr<float>() + thread * scratch_floats;
    for (int64_t i; (i = next.fetch_add(1)) < n;) run(i, own);
  });
}
constexpr auto in_turn = [](int64_t n, int64_t scratch_floats, auto run) { take_in_turn(n, scratch_floats, run); };

void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, double scale,
             const Mask& mask, double dropout_p, int64_t seed) {
  const Problem p = problem_of(q, k, v, scale, mask, make_dropout(dropout_p, seed));
  const ForwardOutputs out{rows_of<Output>(o), lse.data_ptr<float>()};
  run_forward(choose_capability(), p, out, at::get_num_threads(), in_turn);
}

void backward(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& o, const Tensor& lse, const MaybeTensor& dq, const MaybeTensor& dk, const MaybeTensor& dv,
              double scale, const Mask& mask, double dropout_p, int64_t seed) {
  const Problem p = problem_of(q, k, v, scale, mask, make_dropout(dropout_p, seed));
  BackwardTensors t{};
  t.o = rows_of<Input>(o);
  if (d_o) t.d_o = rows_of<Input>(*d_o);
  t.lse = lse.const_data_ptr<float>();
  t.d_lse = floats_or_null(d_lse);
  TORCH_CHECK_VALUE(!dq || dq->scalar_type() == at::kFloat, "dq must be float32: it is summed in place");
  TORCH_CHECK_VALUE(dk.has_value() == dv.has_value(), "dk and dv are computed together");
  if (dq) t.dq = rows_of<Output>(*dq);
  if (dk) t.dk = rows_of<Output>(*dk), t.dv = rows_of<Output>(*dv);
  run_backward(choose_capability(), p, t, at::get_num_threads(), in_turn);
}

// bool [B, n_q, n_k], by the lists and ranges that the kernels walk, for blocks of `block` queries: the tests compare
// it with Mask.keep.
Tensor keep(const Mask& mask, int64_t block) {
  const int64_t B = int64_t(mask.q_start.size());
  Tensor result = at::empty({B, mask.n_q, mask.n_k}, at::kBool).zero_();
  for (int64_t b = 0; b < B; ++b) {
    const IndexList &queries = mask.queries.lists()[b], &keys = mask.keys.lists()[b];
    const auto visible = [&](int64_t i) {
      return visible_keys(mask.band, position_of(queries.at(i), mask.q_start[b]), mask.n_k);
    };
    for (int64_t first = 0; first < queries.count; first += block) {
      const int64_t end = std::min(first + block, queries.count);
      const BlockRange range = block_range(visible(first), visible(end - 1));
      for (int64_t i = first; i < end; ++i) {
        bool* row = result.data_ptr<bool>() + (b * mask.n_q + queries.at(i)) * mask.n_k;
        const int64_t last = keys.lower_bound(range.some.end);
        for (int64_t j = keys.lower_bound(range.some.begin); j < last; ++j) {
          row[keys.at(j)] = range.all.contains(keys.at(j)) || visible(i).contains(keys.at(j));
        }
      }
    }
  }
  return result;
}

// For the benchmarks: takes `steps` steps of fma_chains in every thread, and returns how many operations they are.
double fma_ceiling(int64_t steps) {
  const Kernels& kernels = choose_capability().kernels_for(DType::f32);
  const int64_t threads = at::get_num_threads();
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { kernels.fma_chains(steps); });
  return double(threads) * steps * kernels.chain_operations;
}

// For the tests: philox.h against published answers.
std::array<uint32_t, 4> philox_words(int64_t seed, const std::array<uint32_t, 4>& counter) {
  const PhiloxWords words = philox(philox_key(seed), {counter[0], counter[1], counter[2], counter[3]});
  return {words.x0, words.x1, words.x2, words.x3};
}

std::string capability() { return choose_capability().name(); }

pybind11::dict build_info() {
  pybind11::dict info;
  info["capability"] = capability();
  pybind11::list compiled, runs_here;
  for (const Capability& each : capabilities()) {
    compiled.append(each.name());
    if (each.runs_here) runs_here.append(each.name());
  }
  info["compiled_for"] = compiled;
  info["runs_here"] = runs_here;
  info["compiler"] = __VERSION__;
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<Mask>(m, "Mask").def(
      py::init<int64_t, int64_t, int64_t, bool, std::optional<int64_t>, std::optional<int64_t>, std::vector<int64_t>,
               const MaybeTensor&, const MaybeTensor&>(),
      py::kw_only(), py::arg("B"), py::arg("n_q"), py::arg("n_k"), py::arg("causal"), py::arg("left"), py::arg("right"),
      py::arg("q_start"), py::arg("real_queries"), py::arg("real_keys"));
  m.def("forward", &forward, without_gil);
  m.def("backward", &backward, without_gil);
  m.def("keep", &keep);
  m.def("fma_ceiling", &fma_ceiling, without_gil);
  m.def("philox", &philox_words);
  m.def("capability", &capability);
  m.def("build_info", &build_info);
}

}  // namespace fastattn
