// The module fastattn._native_cpu: plain functions over tensors. fastattn/backends/native calls them, and allocates
// what they write; fastattn/ops.py is where PyTorch is told.
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "../dtype_of_tensor.h"
#include "mask_tables.h"
#include "params.h"
#include "run.h"
#include "threads.h"

namespace fastattn {
namespace {

template <class Rows>
Rows rows_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1),
                    "tensors must be [B, H, N, D] on the CPU with a last stride of 1, got shape ", x.sizes(),
                    ", strides ", x.strides(), " on ", x.device());
  return {static_cast<decltype(Rows::data)>(x.data_ptr()), dtype_of(x), x.stride(0), x.stride(1), x.stride(2)};
}

const float* floats_or_null(const MaybeTensor& x) { return x ? x->const_data_ptr<float>() : nullptr; }

// What becomes of scale * q k^T: a bound, a bias, expanded to [B, H, n_q, n_k], slopes, fp32 [B, H], and one more
// score, fp32 [H].
struct Scores {
  double scale;
  std::optional<double> softcap;
  MaybeTensor bias, alibi_slopes, sinks;
};

Params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, const Scores& scores,
                 const Dropout& dropout) {
  Params p{};
  p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1);
  p.n_q = q.size(2), p.n_k = k.size(2), p.d_qk = q.size(3), p.d_v = v.size(3);
  TORCH_CHECK_VALUE(p.B == mask.B && p.H == mask.H && p.n_q == mask.n_q && p.n_k == mask.n_k,
                    "the mask is for other sizes than q and k");
  mask.describe(p);
  p.scale = scores.scale;
  if (scores.softcap) p.softcap = std::clamp(*scores.softcap, kLeastSoftcap, kMostSoftcap);
  p.q = rows_of<Input>(q), p.k = rows_of<Input>(k), p.v = rows_of<Input>(v);
  if (scores.bias) {
    TORCH_CHECK_VALUE(scores.bias->sizes() == at::IntArrayRef({p.B, p.H, p.n_q, p.n_k}), "bias must be [", p.B, ", ",
                      p.H, ", ", p.n_q, ", ", p.n_k, "], got ", scores.bias->sizes());
    p.bias = table_of(*scores.bias), p.bias_dtype = dtype_of(*scores.bias);
  }
  if (scores.alibi_slopes) {
    TORCH_CHECK_VALUE(scores.alibi_slopes->sizes() == at::IntArrayRef({p.B, p.H}) &&
                          scores.alibi_slopes->is_contiguous(),
                      "alibi_slopes must be contiguous [", p.B, ", ", p.H, "]");
    p.alibi_slopes = scores.alibi_slopes->const_data_ptr<float>();
  }
  if (scores.sinks) {
    TORCH_CHECK_VALUE(scores.sinks->sizes() == at::IntArrayRef({p.H}) && scores.sinks->is_contiguous(),
                      "sinks must be contiguous [", p.H, "]");
    p.sinks = scores.sinks->const_data_ptr<float>();
  }
  p.dropout = dropout;
  return p;
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Mask& mask,
             double scale, std::optional<double> softcap, const MaybeTensor& bias, const MaybeTensor& alibi_slopes,
             const MaybeTensor& sinks, double dropout_p, int64_t seed) {
  const Params p = params_of(q, k, v, mask, {scale, softcap, bias, alibi_slopes, sinks}, make_dropout(dropout_p, seed));
  const ForwardOutputs out{rows_of<Output>(o), lse.data_ptr<float>()};
  run_forward(choose_capability(), p, out, at::get_num_threads(), in_turn, in_shares);
}

uint64_t keys_of_plain_tensors() {
  const c10::InferenceMode not_in_inference_mode(false);
  return at::empty({0}, at::kFloat).key_set().raw_repr();
}
const uint64_t kPlainKeys = keys_of_plain_tensors();

// Whether a tensor is nothing but its memory, on the CPU.
bool plain(const Tensor& x) { return !(x.key_set().raw_repr() & ~kPlainKeys); }
bool plain(const MaybeTensor& x) { return !x || plain(*x); }

// Whether PyTorch would do nothing with a call but hand it on, and take its gradients: the twin of _only_computed in
// fastattn/ops.py. Autocast is asked for here too.
template <class... TensorOrNone>
bool only_computed(const TensorOrNone&... tensors) {
  const uint64_t of_modes = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return !(of_modes & ~c10::default_included_set.raw_repr()) && !at::impl::torch_function_mode_enabled() &&
         !at::hasCallbacks() && !at::autocast::is_autocast_enabled(at::kCPU) && (plain(tensors) && ...);
}

bool requires_grad(const Tensor& x) { return x.requires_grad(); }
bool requires_grad(const MaybeTensor& x) { return x && x->requires_grad(); }

template <class... TensorOrNone>
bool wants_gradients(const TensorOrNone&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Whether q, k and v are right, have something in them, and can be read as they are.
bool fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  const at::ScalarType dtype = q.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  for (const Tensor& x : {q, k, v}) {
    if (x.dim() != 4 || x.numel() == 0 || (x.stride(3) != 1 && x.size(3) != 1)) return false;
    if (x.scalar_type() != dtype || x.device() != q.device()) return false;
    if (x.size(2) > std::numeric_limits<int32_t>::max()) return false;
  }
  return k.size(0) == q.size(0) && k.size(3) == q.size(3) && q.size(1) % k.size(1) == 0 &&
         v.sizes().slice(0, 3) == k.sizes().slice(0, 3);
}

// Whether a table of the tokens of x is right, if there is one.
bool fits(const MaybeTensor& table, const Tensor& x, std::initializer_list<at::ScalarType> dtypes) {
  return !table || (plain(table) && std::count(dtypes.begin(), dtypes.end(), table->scalar_type()) &&
                    table->device() == x.device() && table->sizes() == at::IntArrayRef({x.size(0), x.size(2)}));
}

// [B, H, n_q, d_v] in the memory order that empty_output of fastattn/spec.py gives it.
Tensor empty_output(const Tensor& q, int64_t d_v) {
  const int64_t B = q.size(0), H = q.size(1), n_q = q.size(2);
  const bool heads_inside_tokens = q.stride(1) < q.stride(2);
  const int64_t of_head = heads_inside_tokens ? d_v : n_q * d_v, of_token = heads_inside_tokens ? H * d_v : d_v;
  return at::empty_strided({B, H, n_q, d_v}, {H * n_q * d_v, of_head, of_token, 1}, q.options());
}

void backward(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& o, const Tensor& lse, const MaybeTensor& dq, const MaybeTensor& dk, const MaybeTensor& dv,
              const MaybeTensor& d_bias, const MaybeTensor& d_column, const MaybeTensor& d_row,
              const MaybeTensor& d_slope, const Mask& mask, double scale, std::optional<double> softcap,
              const MaybeTensor& bias, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, double dropout_p,
              int64_t seed) {
  const Params p = params_of(q, k, v, mask, {scale, softcap, bias, alibi_slopes, sinks}, make_dropout(dropout_p, seed));
  BackwardTensors t{};
  t.o = rows_of<Input>(o);
  if (d_o) t.d_o = rows_of<Input>(*d_o);
  t.lse = lse.const_data_ptr<float>();
  t.d_lse = floats_or_null(d_lse);
  TORCH_CHECK_VALUE(!dq || dq->scalar_type() == at::kFloat, "dq must be float32: it is summed in place");
  TORCH_CHECK_VALUE(dk.has_value() == dv.has_value(), "dk and dv are computed together");
  if (dq) t.dq = rows_of<Output>(*dq);
  if (dk) t.dk = rows_of<Output>(*dk), t.dv = rows_of<Output>(*dv);
  for (const MaybeTensor& summed : {d_bias, d_column, d_row, d_slope}) {
    TORCH_CHECK_VALUE(!summed || summed->is_contiguous(), "what gradients are summed in must be contiguous");
  }
  if (d_bias) {
    TORCH_CHECK_VALUE(d_bias->dim() == 4 && d_bias->size(2) == p.n_q && d_bias->size(3) == p.n_k, "d_bias must be [",
                      p.B, " or 1, at most ", p.H, ", ", p.n_q, ", ", p.n_k, "], got ", d_bias->sizes());
    t.d_bias = d_bias->data_ptr<float>();
    t.d_bias_batch_stride = d_bias->size(0) < p.B ? 0 : d_bias->stride(0);
    t.d_bias_heads = d_bias->size(1);
  }
  if (d_column) t.d_column = d_column->data_ptr<float>();
  if (d_row) t.d_row = d_row->data_ptr<float>();
  if (d_slope) t.d_slope = d_slope->data_ptr<float>();
  run_backward(choose_capability(), p, t, at::get_num_threads(), in_turn);
}

// `x` with the elements of a row side by side, copied if they are not.
Tensor with_rows(const Tensor& x) { return x.stride(3) == 1 || x.size(3) <= 1 ? x : x.contiguous(); }

// A call without any other term, with which PyTorch has nothing to do but to take its gradients, and whose tensors fit
// each other as they are.
class PlainCall {
 public:
  template <class... OfMask>
  PlainCall(double scale, OfMask&&... of_mask) : mask_(std::forward<OfMask>(of_mask)...), scale_(scale) {}

  // o and lse.
  std::tuple<Tensor, Tensor> run(const Tensor& q, const Tensor& k, const Tensor& v) const {
    const Tensor o = empty_output(q, v.size(3)), lse = at::empty({q.size(0), q.size(1), q.size(2)}, at::kFloat);
    forward(q, k, v, o, lse, mask_, scale_, {}, {}, {}, {}, 0, 0);
    return {o, lse};
  }

  // The gradients of q, k and v that are wanted; nothing at all where PyTorch has more to do with it. `q`, `k`, `v`,
  // `o` and `lse` are those of `run`.
  std::optional<std::array<MaybeTensor, 3>> gradients(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensor& q,
                                                      const Tensor& k, const Tensor& v, const Tensor& o,
                                                      const Tensor& lse, const std::array<bool, 3>& wanted) const {
    if (!only_computed(d_o, d_lse, q, k, v, o, lse) || wants_gradients(d_o, d_lse, q, k, v)) return {};
    const auto contiguous = [](const MaybeTensor& x) { return x ? MaybeTensor(x->contiguous()) : x; };
    MaybeTensor dq, dk, dv;
    if (wanted[0]) dq = at::empty_like(q, q.options().dtype(at::kFloat));
    if (wanted[1] || wanted[2]) dk = at::empty_like(k), dv = at::empty_like(v);
    backward(d_o ? MaybeTensor(with_rows(*d_o)) : d_o, contiguous(d_lse), q, k, v, with_rows(o), lse.contiguous(), dq,
             dk, dv, {}, {}, {}, {}, mask_, scale_, {}, {}, {}, {}, 0, 0);
    if (dq) dq = dq->to(q.scalar_type());
    return std::array{dq, wanted[1] ? dk : MaybeTensor(), wanted[2] ? dv : MaybeTensor()};
  }

 private:
  const Mask mask_;
  const double scale_;
};

// o, lse, and the call where its gradients are wanted; nothing for any other call, right or wrong: fastattn/api.py
// finds out which.
std::optional<std::tuple<Tensor, Tensor, std::unique_ptr<PlainCall>>> at_once(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& real_queries, const MaybeTensor& real_keys,
    const MaybeTensor& ids_q, const MaybeTensor& ids_k, bool causal, int64_t q_start, std::optional<int64_t> left,
    std::optional<int64_t> right, std::optional<double> scale) {
  if (!only_computed(q, k, v) || !fit(q, k, v)) return {};
  if (!fits(real_queries, q, {at::kBool}) || !fits(real_keys, k, {at::kBool})) return {};
  if (!fits(ids_q, q, {at::kInt, at::kLong}) || !fits(ids_k, k, {at::kInt, at::kLong})) return {};
  if (scale && !std::isfinite(*scale)) return {};
  auto call =
      std::make_unique<PlainCall>(scale.value_or(std::pow(q.size(3), -0.5)), q.size(0), q.size(1), q.size(2), k.size(2),
                                  causal, left, right, q_start, real_queries, real_keys, ids_q, ids_k, MaybeTensor());
  auto [o, lse] = call->run(q, k, v);
  if (!wants_gradients(q, k, v)) call.reset();
  return std::make_tuple(std::move(o), std::move(lse), std::move(call));
}

// A call without values.
Params weights_params(const Tensor& q, const Tensor& k, const Mask& mask, const Scores& scores, double dropout_p,
                      int64_t seed) {
  Params p = params_of(q, k, k, mask, scores, make_dropout(dropout_p, seed));
  p.d_v = 0;
  return p;
}

void weights(const Tensor& q, const Tensor& k, const MaybeTensor& lse, const Tensor& out, const Mask& mask,
             double scale, std::optional<double> softcap, const MaybeTensor& bias, const MaybeTensor& alibi_slopes,
             const MaybeTensor& sinks, double dropout_p, int64_t seed) {
  const Params p = weights_params(q, k, mask, {scale, softcap, bias, alibi_slopes, sinks}, dropout_p, seed);
  const bool average_heads = out.size(1) == 1;
  TORCH_CHECK_VALUE(out.sizes() == at::IntArrayRef({p.B, average_heads ? 1 : p.H, p.n_q, p.n_k}),
                    "weights must be [B, 1 or H, n_q, n_k], got ", out.sizes());
  run_weights(choose_capability(), p, floats_or_null(lse), rows_of<Output>(out), average_heads, at::get_num_threads(),
              in_turn);
}

void received(const Tensor& q, const Tensor& k, const Tensor& out, const Mask& mask, double scale,
              std::optional<double> softcap, const MaybeTensor& bias, const MaybeTensor& alibi_slopes,
              const MaybeTensor& sinks, double dropout_p, int64_t seed) {
  const Params p = weights_params(q, k, mask, {scale, softcap, bias, alibi_slopes, sinks}, dropout_p, seed);
  TORCH_CHECK_VALUE(out.sizes() == at::IntArrayRef({p.B, p.H, p.n_k}) && out.is_contiguous(),
                    "received must be contiguous [B, H, n_k], got ", out.sizes());
  run_received(choose_capability(), p, out.data_ptr<float>(), at::get_num_threads(), in_turn);
}

void top_keys(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& keys, const Mask& mask,
              double scale, std::optional<double> softcap, const MaybeTensor& bias, const MaybeTensor& alibi_slopes,
              const MaybeTensor& sinks, double dropout_p, int64_t seed) {
  const Params p = weights_params(q, k, mask, {scale, softcap, bias, alibi_slopes, sinks}, dropout_p, seed);
  TORCH_CHECK_VALUE(weights.dim() == 4 && weights.sizes() == keys.sizes() && weights.is_contiguous() &&
                        keys.is_contiguous() && weights.sizes().slice(0, 3) == at::IntArrayRef({p.B, p.H, p.n_q}),
                    "weights and keys must be contiguous [B, H, n_q, top_k], got ", weights.sizes());
  const TopKeysOutputs out{weights.data_ptr<float>(), keys.data_ptr<int64_t>(), weights.size(3)};
  run_top_keys(choose_capability(), p, out, at::get_num_threads(), in_turn);
}

// bool [B, H, n_q, n_k], by the lists, ranges and gaps that the kernels walk, for blocks of `block` queries: the tests
// compare it with Mask.keep.
Tensor keep(const Mask& mask, int64_t block) {
  Params p{};
  p.B = mask.B, p.H = mask.H, p.n_q = mask.n_q, p.n_k = mask.n_k;
  mask.describe(p);
  const Tensor result = at::empty({p.B, p.H, p.n_q, p.n_k}, at::kBool).zero_();
  const auto sees = [&](int64_t b, int64_t h, int64_t query, int64_t key) {
    const uint32_t gaps = p.ranges.gaps ? p.ranges.at(b, h, query).gaps : kNoGaps;
    return p.visible(b, h, query).contains(key) && !(gaps & kDenseGaps && !p.dense.row(b, h, query)[key]) &&
           !(gaps & kOtherDocuments && p.documents.of_query[b * p.n_q + query] != p.documents.of_key[b * p.n_k + key]);
  };
  for (int64_t head = 0; head < p.B * p.H; ++head) {
    const int64_t b = head / p.H, h = head % p.H;
    const IndexList &queries = p.queries[b], &keys = p.keys[b];
    for (int64_t first = 0; first < queries.count; first += block) {
      const int64_t end = std::min(first + block, queries.count);
      BlockRange range = no_queries(p.n_k);
      uint32_t gaps = kNoGaps;
      for (int64_t i = first; i < end; ++i) {
        range.add(p.visible(b, h, queries.at(i)));
        if (p.ranges.gaps) gaps |= p.ranges.at(b, h, queries.at(i)).gaps;
      }
      for (int64_t i = first; i < end; ++i) {
        bool* row = result.data_ptr<bool>() + (head * p.n_q + queries.at(i)) * p.n_k;
        const int64_t last = keys.lower_bound(range.some.end);
        for (int64_t j = keys.lower_bound(range.some.begin); j < last; ++j) {
          row[keys.at(j)] = (!gaps && range.all.contains(keys.at(j))) || sees(b, h, queries.at(i), keys.at(j));
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
      py::init<int64_t, int64_t, int64_t, int64_t, bool, std::optional<int64_t>, std::optional<int64_t>,
               const std::variant<Tensor, int64_t>&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
               const MaybeTensor&, const MaybeTensor&>(),
      py::kw_only(), py::arg("B"), py::arg("H"), py::arg("n_q"), py::arg("n_k"), py::arg("causal"), py::arg("left"),
      py::arg("right"), py::arg("q_start"), py::arg("real_queries"), py::arg("real_keys"), py::arg("ids_q"),
      py::arg("ids_k"), py::arg("dense"));
  m.def("forward", &forward, without_gil);
  m.def("at_once", &at_once, without_gil);
  py::class_<PlainCall>(m, "PlainCall").def("gradients", &PlainCall::gradients, without_gil);
  m.def("backward", &backward, without_gil);
  m.def("weights", &weights, without_gil);
  m.def("received", &received, without_gil);
  m.def("top_keys", &top_keys, without_gil);
  m.def("keep", &keep);
  m.def("fma_ceiling", &fma_ceiling, without_gil);
  m.def("philox", &philox_words);
  m.def("capability", &capability);
  m.def("build_info", &build_info);
}

}  // namespace fastattn
