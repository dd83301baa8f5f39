// The module fastattn._cpu: plain functions of tensors and of a Spec of fastattn/spec.py, which return what they
// allocate. fastattn/backends/cpu.py calls them; fastattn/ops.py is where PyTorch is told.
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
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
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.dim() == 4 && has_rows(x),
                    "tensors must be [B, H, N, D] on the CPU with a last stride of 1, got shape ", x.sizes(),
                    ", strides ", x.strides(), " on ", x.device());
  return {static_cast<decltype(Rows::data)>(x.data_ptr()), dtype_of(x), x.stride(0), x.stride(1), x.stride(2)};
}

float* floats_or_null(const MaybeTensor& x) { return x ? x->data_ptr<float>() : nullptr; }

// Spec of fastattn/spec.py, and its Mask.
struct Spec {
  bool causal = false;
  int64_t q_offset = 0;
  MaybeTensor q_offsets;  // in the place of q_offset
  std::optional<int64_t> left, right;
  MaybeTensor real_queries, real_keys, ids_q, ids_k, dense;
  double scale = 1;
  std::optional<double> softcap;
  MaybeTensor bias, alibi_slopes, sinks;
  double dropout_p = 0;
  MaybeTensor seed;

  // Its tensors but the seed, in the order of the arguments of the ops in fastattn/ops.py.
  std::array<MaybeTensor*, 9> tensors() {
    return {&bias, &alibi_slopes, &sinks, &q_offsets, &real_keys, &real_queries, &ids_q, &ids_k, &dense};
  }
};

// Names of attributes, interned once: a look-up by them makes no string.
struct Names {
  PyObject *mask = of("mask"), *causal = of("causal"), *q_offset = of("q_offset"), *window = of("window"),
           *real_queries = of("real_queries"), *real_keys = of("real_keys"), *segment_ids = of("segment_ids"),
           *dense = of("dense"), *scale = of("scale"), *softcap = of("softcap"), *bias = of("bias"),
           *alibi_slopes = of("alibi_slopes"), *sinks = of("sinks"), *dropout_p = of("dropout_p"), *seed = of("seed");

  static PyObject* of(const char* name) { return PyUnicode_InternFromString(name); }
};

const Names& names() {
  static const Names& names = *new Names;
  return names;
}

pybind11::object attribute(pybind11::handle from, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(from.ptr(), name);
  if (!value) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

template <class T>
void read(pybind11::handle from, PyObject* name, T& to) {
  to = attribute(from, name).cast<T>();
}

void read_mask(pybind11::handle mask, Spec& spec) {
  read(mask, names().causal, spec.causal);
  const pybind11::object q_offset = attribute(mask, names().q_offset);
  if (PyLong_Check(q_offset.ptr())) {
    spec.q_offset = q_offset.cast<int64_t>();
  } else {
    spec.q_offsets = q_offset.cast<Tensor>();
  }
  using Window = std::pair<std::optional<int64_t>, std::optional<int64_t>>;
  std::tie(spec.left, spec.right) = attribute(mask, names().window).cast<Window>();
  read(mask, names().real_queries, spec.real_queries);
  read(mask, names().real_keys, spec.real_keys);
  const pybind11::object segment_ids = attribute(mask, names().segment_ids);
  if (!segment_ids.is_none()) std::tie(spec.ids_q, spec.ids_k) = segment_ids.cast<std::pair<Tensor, Tensor>>();
  read(mask, names().dense, spec.dense);
}

Spec spec_from_python(pybind11::handle from) {
  Spec spec;
  read_mask(attribute(from, names().mask), spec);
  read(from, names().scale, spec.scale);
  read(from, names().softcap, spec.softcap);
  read(from, names().bias, spec.bias);
  read(from, names().alibi_slopes, spec.alibi_slopes);
  read(from, names().sinks, spec.sinks);
  read(from, names().dropout_p, spec.dropout_p);
  read(from, names().seed, spec.seed);
  return spec;
}

// A call in the form that the kernels take; it keeps the tensors and the tables that `params` points to.
class Call {
 public:
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Spec& spec)
      : q_(with_rows(checked(q, "q"))),
        k_(with_rows(checked(k, "k"))),
        v_(with_rows(checked(v, "v"))),
        mask_(q.size(0), q.size(1), q.size(2), k.size(2), spec.causal, spec.left, spec.right, spec.q_offset,
              spec.q_offsets, spec.real_queries, spec.real_keys, spec.ids_q, spec.ids_k,
              spec.dense ? MaybeTensor(expanded(*spec.dense, {q.size(0), q.size(1), q.size(2), k.size(2)}, "dense"))
                         : MaybeTensor()) {
    Params& p = params_;
    p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1);
    p.n_q = q.size(2), p.n_k = k.size(2), p.d_qk = q.size(3), p.d_v = v.size(3);
    TORCH_CHECK_VALUE(p.B == k.size(0) && p.d_qk == k.size(3) && p.H_kv > 0 && p.H % p.H_kv == 0,
                      "k must be [B, H_kv, n_k, D] like q, where H_kv divides H, got q ", q.sizes(), " and k ",
                      k.sizes());
    check_sizes(v, {p.B, p.H_kv, p.n_k, p.d_v}, "v");
    TORCH_CHECK_VALUE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "k and v must be ",
                      q.scalar_type(), " like q, got ", k.scalar_type(), " and ", v.scalar_type());
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(p.n_q <= kMost && p.n_k <= kMost, "n_q and n_k must be at most ", kMost, ", got ", p.n_q, " and ",
                      p.n_k);
    mask_.describe(p);
    p.scale = spec.scale;
    if (spec.softcap) p.softcap = std::clamp(*spec.softcap, kLeastSoftcap, kMostSoftcap);
    p.q = rows_of<Input>(q_), p.k = rows_of<Input>(k_), p.v = rows_of<Input>(v_);
    if (spec.bias) {
      const bool as_it_is = spec.bias->scalar_type() != at::kDouble;
      bias_ = expanded(as_it_is ? *spec.bias : spec.bias->to(at::kFloat), {p.B, p.H, p.n_q, p.n_k}, "bias");
      p.bias = table_of(bias_), p.bias_dtype = dtype_of(bias_);
    }
    if (spec.alibi_slopes) {
      const Tensor& slopes = checked_term(*spec.alibi_slopes, "alibi_slopes");
      if (slopes.dim() != 1) check_sizes(slopes, {p.B, p.H}, "alibi_slopes");
      if (slopes.dim() == 1) check_sizes(slopes, {p.H}, "alibi_slopes");
      slopes_ = slopes.to(at::kFloat).expand({p.B, p.H}).contiguous();
      p.alibi_slopes = slopes_.const_data_ptr<float>();
    }
    if (spec.sinks) {
      check_sizes(checked_term(*spec.sinks, "sinks"), {p.H}, "sinks");
      sinks_ = spec.sinks->to(at::kFloat).contiguous();
      p.sinks = sinks_.const_data_ptr<float>();
    }
    p.dropout = make_dropout(spec.dropout_p, spec.seed ? spec.seed->item<int64_t>() : 0);
  }

  const Params& params() const { return params_; }

 private:
  static const Tensor& checked(const Tensor& x, const char* name) {
    check_on_cpu(x, name);
    TORCH_CHECK_VALUE(x.dim() == 4, name, " must be [B, H, N, D], got ", x.sizes());
    return x;
  }

  static const Tensor& checked_term(const Tensor& x, const char* name) {
    check_on_cpu(x, name);
    TORCH_CHECK_VALUE(x.is_floating_point(), name, " must be a floating Tensor, got ", x.scalar_type());
    return x;
  }

  const Tensor q_, k_, v_;
  const Mask mask_;
  Tensor bias_, slopes_, sinks_;
  Params params_{};
};

// [B, H, n_q, d_v] in the memory order that empty_output of fastattn/spec.py gives it.
Tensor empty_output(const Tensor& q, int64_t d_v) {
  const int64_t B = q.size(0), H = q.size(1), n_q = q.size(2);
  const bool heads_inside_tokens = q.stride(1) < q.stride(2);
  const int64_t of_head = heads_inside_tokens ? d_v : n_q * d_v, of_token = heads_inside_tokens ? H * d_v : d_v;
  return at::empty_strided({B, H, n_q, d_v}, {H * n_q * d_v, of_head, of_token, 1}, q.options());
}

// o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32.
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Spec& spec) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const Call call(q, k, v, spec);
  const Tensor o = empty_output(q, v.size(3)), lse = at::empty({q.size(0), q.size(1), q.size(2)}, at::kFloat);
  const ForwardOutputs out{rows_of<Output>(o), lse.data_ptr<float>()};
  run_forward(choose_capability(), call.params(), out, at::get_num_threads(), in_turn, in_shares);
  return {o, lse};
}

uint64_t keys_of_plain_tensors() {
  const c10::InferenceMode not_in_inference_mode(false);
  return at::empty({0}, at::kFloat).key_set().raw_repr();
}
const uint64_t kPlainKeys = keys_of_plain_tensors();

// Whether PyTorch would do nothing with a call of plain tensors but pass it on: no mode, transform, trace, profiler or
// autocast looks on.
bool is_unwatched() {
  const uint64_t of_modes = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return !(of_modes & ~c10::default_included_set.raw_repr()) && !at::impl::torch_function_mode_enabled() &&
         !at::hasCallbacks() && !at::autocast::is_autocast_enabled(at::kCPU);
}

// Heads that share a bias add to its gradient in turn, and so many at once. It must not depend on the number of
// threads, or the bits would.
constexpr int64_t kTablesOfSharedBias = 4;

// fp32 [B or 1, tables, n_q, n_k] of zeros: the gradient of this bias is the sum over the tables.
Tensor zero_d_bias(const Tensor& bias, const Params& p) {
  const int64_t B = bias.dim() > 3 ? bias.size(-4) : 1, H = bias.dim() > 2 ? bias.size(-3) : 1;
  return at::zeros({B, H == 1 ? std::min(p.H, kTablesOfSharedBias) : H, p.n_q, p.n_k}, at::kFloat);
}

// A new tensor of the sizes of `x` with the elements of a row side by side, and in the memory order of `x` where it can
// be.
Tensor writable_like(const Tensor& x, at::ScalarType dtype) {
  const Tensor like_x = at::empty_like(x, x.options().dtype(dtype));
  return has_rows(like_x) ? like_x : at::empty(x.sizes(), like_x.options());
}

// `result` of `writable_like` in the dtype and the memory order of empty_like.
Tensor in_order_of(const Tensor& x, const Tensor& result) {
  const bool in_order = at::empty_like(x, x.options().device(at::kMeta)).strides() == result.strides();
  return in_order ? result.to(x.scalar_type()) : at::empty_like(x).copy_(result);
}

// dq, dk and dv in their dtypes; and sums of dS in fp32: over what shares an entry of the bias, in tables that are to
// be added; over the queries, [B, H, n_k]; over the keys, [B, H, n_q]; and over the keys times their distances.
std::array<MaybeTensor, 7> backward(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const Tensor& o, const Tensor& lse, const Spec& spec,
                                    const std::array<bool, 6>& wanted_results) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const auto [wants_dq, wants_dk_dv, wants_ds, wants_ds_of_keys, wants_ds_of_queries, wants_ds_by_distance] =
      wanted_results;
  const Call call(q, k, v, spec);
  const Params& p = call.params();
  const std::array of_output{p.B, p.H, p.n_q, p.d_v};
  const std::array of_queries{p.B, p.H, p.n_q};
  const auto checked_output = [&](const Tensor& x, const char* name) {
    check_on_cpu(x, name), check_sizes(x, of_output, name);
    TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type(), name, " must be ", q.scalar_type(), " like q, got ",
                      x.scalar_type());
    return with_rows(x);
  };
  const auto checked_statistic = [&](const Tensor& x, const char* name) {
    check_on_cpu(x, name), check_sizes(x, of_queries, name);
    return x.contiguous();
  };
  const Tensor o_rows = checked_output(o, "o"), contiguous_lse = checked_statistic(lse, "lse");
  const MaybeTensor d_o_rows = d_o ? MaybeTensor(checked_output(*d_o, "do")) : d_o;
  const MaybeTensor contiguous_d_lse = d_lse ? MaybeTensor(checked_statistic(*d_lse, "dlse")) : d_lse;
  BackwardTensors t{};
  t.o = rows_of<Input>(o_rows);
  if (d_o) t.d_o = rows_of<Input>(*d_o_rows);
  t.lse = contiguous_lse.const_data_ptr<float>();
  t.d_lse = floats_or_null(contiguous_d_lse);

  MaybeTensor dq, dk, dv, ds, ds_of_keys, ds_of_queries, ds_by_distance;
  if (wants_dq) dq = writable_like(q, at::kFloat), t.dq = rows_of<Output>(*dq);  // it is summed in place
  if (wants_dk_dv) {
    dk = writable_like(k, k.scalar_type()), dv = writable_like(v, v.scalar_type());
    t.dk = rows_of<Output>(*dk), t.dv = rows_of<Output>(*dv);
  }
  if (wants_ds) {
    TORCH_CHECK_VALUE(spec.bias, "bias must be given where its gradient is wanted, got none");
    ds = zero_d_bias(*spec.bias, p);
    t.d_bias_batch_stride = ds->size(0) < p.B ? 0 : ds->stride(0);
    t.d_bias_heads = ds->size(1);
  }
  if (wants_ds_of_keys) ds_of_keys = at::zeros({p.B, p.H, p.n_k}, at::kFloat);
  if (wants_ds_of_queries) ds_of_queries = at::zeros(of_queries, at::kFloat);
  if (wants_ds_by_distance) ds_by_distance = at::zeros(of_queries, at::kFloat);
  t.d_bias = floats_or_null(ds), t.d_column = floats_or_null(ds_of_keys);
  t.d_row = floats_or_null(ds_of_queries), t.d_slope = floats_or_null(ds_by_distance);
  run_backward(choose_capability(), p, t, at::get_num_threads(), in_turn);
  if (wants_dq) dq = in_order_of(q, *dq);
  if (wants_dk_dv) dk = in_order_of(k, *dk), dv = in_order_of(v, *dv);
  return {dq, dk, dv, ds, ds_of_keys, ds_of_queries, ds_by_distance};
}

bool is_plain(const Tensor& x) { return !(x.key_set().raw_repr() & ~kPlainKeys); }

// Attention whose gradients are wanted: of q, k and v, and of nothing else.
class ShortAttention : public torch::autograd::Function<ShortAttention> {
 public:
  using Tensors = torch::autograd::variable_list;
  using Context = torch::autograd::AutogradContext;

  static Tensors forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v, Spec& spec) {
    const auto [o, lse] = fastattn::forward(q, k, v, spec);
    Tensors saved{q, k, v, o, lse};
    for (const MaybeTensor* x : spec.tensors()) saved.push_back(x->value_or(Tensor()));
    context->save_for_backward(std::move(saved));
    context->saved_data["numbers"] =  // of types that compiled autograd can hash
        c10::ivalue::Tuple::create(spec.causal, spec.q_offset, spec.left, spec.right, spec.scale, spec.softcap);
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();  // which refuses those that were changed since
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &o = saved[3], &lse = saved[4];
    const auto& numbers = context->saved_data.at("numbers").toTupleRef().elements();
    Spec spec;
    spec.causal = numbers[0].toBool(), spec.q_offset = numbers[1].toInt(), spec.scale = numbers[4].toDouble();
    spec.left = numbers[2].toOptional<int64_t>(), spec.right = numbers[3].toOptional<int64_t>();
    spec.softcap = numbers[5].toOptional<double>();
    for (size_t i = 0; i < spec.tensors().size(); ++i) *spec.tensors()[i] = if_defined(saved[5 + i]);
    const std::array wanted{context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2)};
    const MaybeTensor d_o = if_defined(gradients[0]), d_lse = if_defined(gradients[1]);
    const auto passed_on = [](const MaybeTensor& x) { return !x || (is_plain(*x) && !x->_fw_grad(0).defined()); };
    if (at::GradMode::is_enabled() || !is_unwatched() || !passed_on(d_o) || !passed_on(d_lse)) {
      return by_pytorch(d_o, d_lse, saved, spec, wanted);
    }
    const auto [dq, dk, dv, ds, ds_of_keys, ds_of_queries, ds_by_distance] =
        fastattn::backward(d_o, d_lse, q, k, v, o, lse, spec, {wanted[0], wanted[1] || wanted[2]});
    return {dq.value_or(Tensor()), wanted[1] ? *dk : Tensor(), wanted[2] ? *dv : Tensor(), Tensor()};
  }

 private:
  static MaybeTensor if_defined(const Tensor& x) { return x.defined() ? MaybeTensor(x) : std::nullopt; }

  // By the ops of fastattn/ops.py: differentiable, and seen by whoever looks on.
  static Tensors by_pytorch(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensors& saved, Spec& spec,
                            const std::array<bool, 3>& wanted) {
    namespace py = pybind11;
    const py::gil_scoped_acquire gil;
    py::list arguments;
    arguments.append(d_o), arguments.append(d_lse);
    for (int i = 0; i < 5; ++i) arguments.append(saved[i]);
    const auto tensors = spec.tensors();
    for (int i = 0; i < 3; ++i) arguments.append(*tensors[i]);
    for (const bool each : wanted) arguments.append(each);
    for (int i = 0; i < 3; ++i) arguments.append(false);
    for (size_t i = 3; i < tensors.size(); ++i) arguments.append(*tensors[i]);
    arguments.append(spec.seed), arguments.append(spec.causal), arguments.append(spec.q_offset);
    arguments.append(spec.left), arguments.append(spec.right), arguments.append(spec.scale);
    arguments.append(spec.softcap), arguments.append(spec.dropout_p), arguments.append(false);
    arguments.append("cpu");
    const auto of_inputs =
        py::module_::import("fastattn.ops").attr("gradients")(py::tuple(arguments)).cast<std::vector<Tensor>>();
    Tensors result(4);
    for (int i = 0; i < 3; ++i) {
      if (wanted[i]) result[i] = of_inputs[i];
    }
    return result;
  }
};

// Reads an argument of `short_way`. False where it is no tensor, or one that is more than its memory.
bool read_plain(PyObject* from, Tensor& to) {
  if (!THPVariable_CheckExact(from)) return false;
  to = THPVariable_Unpack(from);
  return is_plain(to);
}

bool wants_gradient(const Tensor& x) { return x.requires_grad() && at::GradMode::is_enabled(); }

// The same for a term whose gradient is not wanted, or None.
bool read_constant(PyObject* from, MaybeTensor& to) {
  return from == Py_None || (read_plain(from, to.emplace()) && !wants_gradient(*to));
}

// The same for a number that fp32 can hold, or None.
bool read_number(PyObject* from, std::optional<double>& to) {
  if (from == Py_None) return true;
  if (!PyFloat_CheckExact(from)) return false;
  to = PyFloat_AS_DOUBLE(from);
  return *to == 0 || (std::abs(*to) > 0x1p-150 && std::abs(*to) <= std::numeric_limits<float>::max());
}

Tensor weights(const Tensor& q, const Tensor& k, const MaybeTensor& lse, const Spec& spec, bool average_heads);

// (o, lse, weights) of fastattn.attention(q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks), the arguments of
// this function, where PyTorch would do nothing with the call but pass it on and keep what the gradients of q, k and v
// need. None for any other, right or wrong: what it takes is for the general road to find out. `mask` is None or a
// Mask. One more argument: whether the weights are averaged over the heads, or None for no weights.
PyObject* short_way(PyObject*, PyObject* const* arguments, Py_ssize_t count) try {
  constexpr Py_ssize_t kCount = 10;
  Tensor q, k, v;
  Spec spec;
  std::optional<double> scale;
  if (count != kCount || !is_unwatched() || !read_plain(arguments[0], q) || !read_plain(arguments[1], k) ||
      !read_plain(arguments[2], v) || !read_number(arguments[4], scale) || !read_constant(arguments[5], spec.bias) ||
      !read_number(arguments[6], spec.softcap) || !read_constant(arguments[7], spec.alibi_slopes) ||
      !read_constant(arguments[8], spec.sinks)) {
    Py_RETURN_NONE;
  }
  const bool right =
      q.dim() == 4 && k.dim() == 4 && q.numel() > 0 && k.numel() > 0 && v.numel() > 0 &&
      (q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf) &&
      (!spec.softcap || *spec.softcap > 0);
  if (!right) Py_RETURN_NONE;
  spec.scale = scale.value_or(std::pow(q.size(3), -0.5));
  if (arguments[3] != Py_None) read_mask(arguments[3], spec);
  for (const MaybeTensor* x : spec.tensors()) {
    Tensor unused;
    if (*x && !read_plain(pybind11::cast(**x).ptr(), unused)) Py_RETURN_NONE;
  }
  const bool differentiable = wants_gradient(q) || wants_gradient(k) || wants_gradient(v);
  const bool wants_weights = arguments[9] != Py_None, average_heads = arguments[9] == Py_True;
  // Hooks on what is saved, such as a checkpoint's, are Python.
  if (differentiable && (wants_weights || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty())) Py_RETURN_NONE;
  std::tuple<Tensor, Tensor, MaybeTensor> result;
  {
    const pybind11::gil_scoped_release without_gil;
    if (differentiable) {
      const auto outputs = ShortAttention::apply(q, k, v, spec);
      result = {outputs[0], outputs[1], {}};
    } else {
      const auto [o, lse] = forward(q, k, v, spec);
      result = {o, lse, {}};
      if (wants_weights) std::get<2>(result) = weights(q, k, lse, spec, average_heads);
    }
  }
  return pybind11::cast(std::move(result)).release().ptr();
} catch (const std::exception&) {  // such as sizes that do not fit each other; none may reach Python from here
  Py_RETURN_NONE;
}
PyMethodDef kShortWay = {"short_way", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(short_way)),
                         METH_FASTCALL, nullptr};

// A call without values.
class WeightsCall : public Call {
 public:
  WeightsCall(const Tensor& q, const Tensor& k, const Spec& spec) : Call(q, k, k, spec), without_values_(params()) {
    without_values_.d_v = 0;
  }

  const Params& without_values() const { return without_values_; }

 private:
  Params without_values_;
};

// The weights in the dtype of q, [B, 1 or H, n_q, n_k]; `lse` is that of `forward`, or none.
Tensor weights(const Tensor& q, const Tensor& k, const MaybeTensor& lse, const Spec& spec, bool average_heads) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const WeightsCall call(q, k, spec);
  const Params& p = call.without_values();
  if (lse) check_on_cpu(*lse, "lse"), check_sizes(*lse, {p.B, p.H, p.n_q}, "lse");
  const MaybeTensor contiguous_lse = lse ? MaybeTensor(lse->contiguous()) : lse;
  const Tensor result = at::empty({p.B, average_heads ? 1 : p.H, p.n_q, p.n_k}, q.options());
  run_weights(choose_capability(), p, floats_or_null(contiguous_lse), rows_of<Output>(result), average_heads,
              at::get_num_threads(), in_turn);
  return result;
}

// The sum of the weights over the queries, fp32 [B, H, n_k].
Tensor received(const Tensor& q, const Tensor& k, const Spec& spec) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const WeightsCall call(q, k, spec);
  const Params& p = call.without_values();
  const Tensor result = at::empty({p.B, p.H, p.n_k}, at::kFloat);
  run_received(choose_capability(), p, result.data_ptr<float>(), at::get_num_threads(), in_turn);
  return result;
}

// The largest weights of each query, fp32 [B, H, n_q, top_k], and their keys, int64.
std::tuple<Tensor, Tensor> top_keys(const Tensor& q, const Tensor& k, const Spec& spec, int64_t top_k) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const WeightsCall call(q, k, spec);
  const Params& p = call.without_values();
  const Tensor largest = at::empty({p.B, p.H, p.n_q, top_k}, at::kFloat), keys = at::empty_like(largest, at::kLong);
  const TopKeysOutputs out{largest.data_ptr<float>(), keys.data_ptr<int64_t>(), top_k};
  run_top_keys(choose_capability(), p, out, at::get_num_threads(), in_turn);
  return {largest, keys};
}

// bool [B, H, n_q, n_k], by the lists, ranges and gaps that the kernels walk, for blocks of `block` queries: the tests
// compare it with Mask.keep.
Tensor keep(const Tensor& q, const Tensor& k, const Spec& spec, int64_t block) {
  const Call call(q, k, k, spec);
  const Params& p = call.params();
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
}  // namespace fastattn

namespace pybind11::detail {

// Reads the attributes of a Spec of fastattn/spec.py.
template <>
struct type_caster<fastattn::Spec> {
  PYBIND11_TYPE_CASTER(fastattn::Spec, const_name("Spec"));

  bool load(handle spec, bool) {
    value = fastattn::spec_from_python(spec);
    return true;
  }
};

}  // namespace pybind11::detail

namespace fastattn {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("forward", &forward, without_gil);
  m.attr("short_way") = py::reinterpret_steal<py::object>(PyCFunction_New(&kShortWay, nullptr));
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
