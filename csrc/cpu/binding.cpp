// The module fastattn._cpu: functions of tensors and of a Spec of fastattn/spec.py. fastattn/backends/cpu.py calls
// them; fastattn/ops.py is where PyTorch is told. It is written in Python's limited C interface, and of PyTorch it uses
// what is the same in every release (tensors.h, threads.h).
#include <Python.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "params.h"
#include "run.h"
#include "tensors.h"
#include "threads.h"

namespace fastattn {
namespace {

// Runs what needs nothing of Python, while other threads of Python go on.
template <class Run>
void without_gil(Run run) {
  struct Released {
    PyThreadState* const state = PyEval_SaveThread();
    ~Released() { PyEval_RestoreThread(state); }
  } const released;
  run();
}

// What a function of fastattn/spec.py returns for these arguments.
template <class... Values>
Object by_spec(const char* function, const char* format, Values... values) {
  static PyObject* spec = nullptr;  // without a lock of C++, which a thread that waits for the GIL could hold
  if (!spec) spec = Object::result(PyImport_ImportModule("fastattn.spec")).release();
  return Object::result(PyObject_CallMethod(spec, function, format, values...));
}

// Whether torch.empty_like makes of `x` [B, H, N, D] what lies in memory as it is or as [B, N, H, D], without gaps.
bool in_usual_order(const Tensor& x) {
  const std::array<int, 4> order = {0, x.stride(1) < x.stride(2) ? 2 : 1, x.stride(1) < x.stride(2) ? 1 : 2, 3};
  bool decreasing = x.stride(3) == 1;
  for (int i = 0; i < 3; ++i) decreasing = decreasing && x.stride(order[i]) > x.stride(order[i + 1]);
  return decreasing || x.is_contiguous(order);
}

// As empty_output of fastattn/spec.py, mostly in less time.
Object empty_output(const Tensor& q, const Tensor& v) {
  if (q.size(3) != v.size(3) || !in_usual_order(q)) return by_spec("empty_output", "OL", q.object(), v.size(3));
  return Object::result(PyObject_CallFunctionObjArgs(torch_.empty_like, q.object(), nullptr));
}

// The gradient of `x`, which the kernels write in its dtype or in fp32, as empty_gradient and as_gradient of
// fastattn/spec.py have it; mostly in less time.
class Gradient {
 public:
  Gradient(const Tensor& x, bool in_fp32)
      : x_(x), usual_(in_usual_order(x)), converted_(in_fp32 && !x.is(kDLFloat, 32)), written_(empty(), "a gradient") {}

  Output rows() const { return rows_of<Output>(written_); }

  Object result() const {
    if (!usual_) return by_spec("as_gradient", "OO", x_.object(), written_.object());
    if (!converted_) return Object::borrowed(written_.object());
    return Object::result(PyObject_CallMethod(written_.object(), "type_as", "O", x_.object()));
  }

 private:
  Object empty() const {
    if (!usual_) return by_spec("empty_gradient", "OO", x_.object(), converted_ ? Py_True : Py_False);
    const Object arguments = Object::result(PyTuple_Pack(1, x_.object()));
    return Object::result(PyObject_Call(torch_.empty_like, arguments.get(), converted_ ? torch_.in_fp32 : nullptr));
  }

  const Tensor x_;
  const bool usual_, converted_;
  const Tensor written_;
};

// fp32 [B, H, n_q]
Object empty_lse(const Tensor& q) {
  const Object new_empty = Object::result(PyObject_GetAttr(q.object(), torch_.new_empty));
  const Object sizes = Object::result(Py_BuildValue("(LLL)", q.size(0), q.size(1), q.size(2)));
  return Object::result(PyObject_Call(new_empty.get(), sizes.get(), torch_.in_fp32));
}

// o [B, H, n_q, d_v] in the dtype of q; lse [B, H, n_q] in fp32, or None where it is not wanted; and, where it is said
// whether heads are averaged, the weights after dropout, [B, n_q, n_k] or [B, H, n_q, n_k] in the dtype of q.
std::array<Object, 3> outputs_of(const Call& call, const Tensor& q, const Tensor& v, bool wants_lse,
                                 std::optional<bool> average_heads = {}) {
  const Params& p = call.params();
  const Tensor o(empty_output(q, v), "o");
  const MaybeTensor lse = wants_lse ? MaybeTensor(Tensor(empty_lse(q), "lse")) : MaybeTensor();
  const std::unique_ptr<float[]> unwanted(wants_lse ? nullptr : new float[p.B * p.H * p.n_q]);
  float* const statistics = lse ? reinterpret_cast<float*>(lse->data()) : unwanted.get();
  MaybeTensor weights;
  Output rows_of_weights{};
  if (average_heads) {
    const Object sizes = Object::result(*average_heads ? Py_BuildValue("(LLL)", p.B, p.n_q, p.n_k)
                                                       : Py_BuildValue("(LLLL)", p.B, p.H, p.n_q, p.n_k));
    weights.emplace(Object::result(PyObject_CallMethodObjArgs(q.object(), torch_.new_empty, sizes.get(), nullptr)),
                    "weights");
    rows_of_weights = {weights->data(), p.q.dtype, p.n_q * p.n_k * (*average_heads ? 1 : p.H), p.n_q * p.n_k, p.n_k};
  }
  const ForwardOutputs out{output_rows(o, p.q.dtype), statistics};
  const Capability& capability = choose_capability();
  without_gil([&] {
    if (!average_heads) return run_forward(capability, p, out, num_threads(), in_turn, in_shares);
    run_forward_with_weights(capability, p, out, rows_of_weights, *average_heads, num_threads(), in_turn, in_shares);
  });
  const auto or_none = [](const MaybeTensor& x) { return Object::borrowed(x ? x->object() : Py_None); };
  return {Object::borrowed(o.object()), or_none(lse), or_none(weights)};
}

using Arguments = PyObject* const*;

// Arguments: q, k, v, spec.
PyObject* forward(Arguments in) {
  const Call call(in[0], in[1], in[2], in[3]);
  const auto [o, lse, _] =
      outputs_of(call, Tensor(Object::borrowed(in[0]), "q"), Tensor(Object::borrowed(in[2]), "v"), true);
  return PyTuple_Pack(2, o.get(), lse.get());
}

// The same for keys and values in pages [pages, H_kv, keys of a page, D]. Arguments: q, k, v, int32 [B, pages of a
// sample], spec, and the scales of k and v, fp32 [pages, H_kv, keys of a page], or None twice.
PyObject* forward_paged(Arguments in) {
  const Tensor q(Object::borrowed(in[0]), "q"), k(Object::borrowed(in[1]), "k"), v(Object::borrowed(in[2]), "v");
  const std::array<MaybeTensor, 2> scales{maybe_tensor(Object::borrowed(in[5]), "k_scales"),
                                          maybe_tensor(Object::borrowed(in[6]), "v_scales")};
  const Call call(q, k, v, spec_of(in[4]), Tensor(Object::borrowed(in[3]), "block_table"), scales);
  const auto [o, lse, _] = outputs_of(call, q, v, true);
  return PyTuple_Pack(2, o.get(), lse.get());
}

// The gradients (dq, dk, dv), or None in the place of those that are not wanted, from do, dlse, q, k, v, o, lse; a
// tuple that begins with whether those three are wanted; and sums of dS to add to, fp32 or None: over what shares an
// entry of the bias, in tables that are to be added, [B or 1, tables, n_q, n_k]; over the queries, [B, H, n_k]; over
// the keys, [B, H, n_q]; and over the keys times their distances, [B, H, n_q]. of_weights: what arrives at the weights,
// broadcast to [B, H, n_q, n_k], and the sum of that times the weights over the keys, which is added to, fp32
// [B, H, n_q]; or null.
PyObject* gradients_of(const Call& call, Arguments in, PyObject* of_inputs, Arguments of_sums,
                       Arguments of_weights = nullptr) {
  const Params& p = call.params();
  const Sizes of_output{p.B, p.H, p.n_q, p.d_v}, of_queries{p.B, p.H, p.n_q};
  std::vector<Tensor> held;
  held.reserve(5);
  const auto output_like = [&](PyObject* x, const char* name) {
    const Tensor tensor(Object::borrowed(x), name);
    tensor.check_sizes(of_output);
    FASTATTN_CHECK(tensor.dtype() == p.q.dtype, name, " must be of the dtype of q, got ", tensor.dtype_name());
    return rows_of<Input>(held.emplace_back(tensor.in_rows()));
  };
  const auto statistic = [&](PyObject* x, const char* name) {
    const Tensor tensor(Object::borrowed(x), name);
    tensor.check_sizes(of_queries);
    FASTATTN_CHECK(tensor.is(kDLFloat, 32), name, " must be float32, got ", tensor.dtype_name());
    return reinterpret_cast<const float*>(held.emplace_back(tensor.contiguous()).data());
  };
  const auto written = [&](PyObject* x, const char* name) { return maybe_tensor(Object::borrowed(x), name); };
  const auto sums = [&](PyObject* x, const char* name, const Sizes& sizes) {
    const auto tensor = written(x, name);
    return tensor ? tensor->output(sizes) : nullptr;
  };
  BackwardTensors t{};
  t.o = output_like(in[5], "o");
  if (in[0] != Py_None) t.d_o = output_like(in[0], "do");
  t.lse = statistic(in[6], "lse");
  if (in[1] != Py_None) t.d_lse = statistic(in[1], "dlse");
  const auto wanted = [&](int i) { return truth(item(of_inputs, i).get()); };
  if (of_weights && of_weights[0] != Py_None) {
    const Tensor table = held.emplace_back(Tensor(Object::borrowed(of_weights[0]), "d_weights").in_table());
    FASTATTN_CHECK(table.dtype(), "d_weights must be float32, bfloat16 or float16, got ", table.dtype_name());
    t.d_weights = table_of(table, {p.B, p.H, p.n_q, p.n_k});
    t.d_weights_dtype = *table.dtype();
    t.delta_of_weights = Tensor(Object::borrowed(of_weights[1]), "the sums of d_weights").output(of_queries);
  }
  const bool wants_dq = wanted(0), wants_dk = wanted(1), wants_dv = wanted(2);
  std::optional<Gradient> dq, dk, dv;
  if (wants_dq) t.dq = dq.emplace(Tensor(Object::borrowed(in[2]), "q"), true).rows();  // it is summed in place
  if (wants_dk || wants_dv) {
    t.dk = dk.emplace(Tensor(Object::borrowed(in[3]), "k"), false).rows();
    t.dv = dv.emplace(Tensor(Object::borrowed(in[4]), "v"), false).rows();
  }
  if (const auto tables = written(of_sums[0], "the sums of dS")) {
    FASTATTN_CHECK(p.bias.data && tables->dim() == 4, "the sums of dS must be a table, for a bias, got ",
                   tables->sizes_text());
    const int64_t samples = tables->size(0), heads = tables->size(1);
    FASTATTN_CHECK((samples == p.B || samples == 1) && heads > 0 && p.H >= heads, "the sums of dS must be for ", p.B,
                   " samples or one, and at most ", p.H, " heads, got ", tables->sizes_text());
    const bool by_distance = p.bias.is_by_distance();
    FASTATTN_CHECK(!by_distance || (samples == p.B && heads == p.H),
                   "the sums of dS by distance must be for each head");
    t.d_bias = {
        tables->output(by_distance ? Sizes{samples, heads, 2, p.n_q + p.n_k - 1} : Sizes{samples, heads, p.n_q, p.n_k}),
        samples < p.B ? 0 : tables->stride(0), heads, by_distance ? 2 * (p.n_q + p.n_k - 1) : p.n_q * p.n_k, p.n_k};
    if (by_distance) t.d_bias = t.d_bias.by_distance(p.n_q);
  }
  t.d_column = sums(of_sums[1], "the sums of dS over the queries", {p.B, p.H, p.n_k});
  t.d_row = sums(of_sums[2], "the sums of dS over the keys", of_queries);
  t.d_slope = sums(of_sums[3], "the sums of dS by distance", of_queries);
  const Capability& capability = choose_capability();
  without_gil([&] { run_backward(capability, p, t, num_threads(), in_turn); });
  const auto result = [](const std::optional<Gradient>& gradient, bool wanted) {
    return wanted ? gradient->result() : Object::borrowed(Py_None);
  };
  return PyTuple_Pack(3, result(dq, wants_dq).get(), result(dk, wants_dk).get(), result(dv, wants_dv).get());
}

// As gradients_of. Arguments: do, dlse, q, k, v, o, lse, spec, which are wanted, the sums, of_weights.
PyObject* backward(Arguments in) { return gradients_of({in[2], in[3], in[4], in[7]}, in, in[8], in + 9, in + 13); }

// Writes the weights in the dtype of q, [B, 1 or H, n_q, n_k]. Arguments: q, k, lse or None, spec, the weights.
PyObject* weights(Arguments in) {
  const Call call(in[0], in[1], in[1], in[3]);
  const Params p = call.without_values();
  const auto lse = maybe_tensor(Object::borrowed(in[2]), "lse");
  const MaybeTensor contiguous_lse = lse ? MaybeTensor(lse->contiguous()) : lse;
  const Tensor result(Object::borrowed(in[4]), "weights");
  const bool averaged = result.dim() == 4 && result.size(1) == 1;
  result.check_sizes({p.B, averaged ? 1 : p.H, p.n_q, p.n_k});
  const Output out = output_rows(result, p.q.dtype);
  const float* const statistic = lse ? contiguous_lse->output<const float>({p.B, p.H, p.n_q}) : nullptr;
  const Capability& capability = choose_capability();
  without_gil([&] { run_weights(capability, p, statistic, out, averaged, num_threads(), in_turn); });
  Py_RETURN_NONE;
}

// Writes the sum of the weights over the queries, fp32 [B, H, n_k]. Arguments: q, k, spec, the sums.
PyObject* received(Arguments in) {
  const Call call(in[0], in[1], in[1], in[2]);
  const Params p = call.without_values();
  float* const out = Tensor(Object::borrowed(in[3]), "the sums").output({p.B, p.H, p.n_k});
  const Capability& capability = choose_capability();
  without_gil([&] { run_received(capability, p, out, num_threads(), in_turn); });
  Py_RETURN_NONE;
}

// Writes the largest weights of each query, fp32 [B, H, n_q, top_k], and their keys, int64. Arguments: q, k, spec, the
// weights, the keys.
PyObject* top_keys(Arguments in) {
  const Call call(in[0], in[1], in[1], in[2]);
  const Params p = call.without_values();
  const Tensor largest(Object::borrowed(in[3]), "weights"), keys(Object::borrowed(in[4]), "keys");
  FASTATTN_CHECK(largest.dim() == 4, "weights must be [B, H, n_q, top_k], got ", largest.sizes_text());
  const int64_t top_k = largest.size(3);
  const Sizes sizes{p.B, p.H, p.n_q, top_k};
  const TopKeysOutputs out{largest.output(sizes), keys.output<int64_t>(sizes, kDLInt, 64), top_k};
  const Capability& capability = choose_capability();
  without_gil([&] { run_top_keys(capability, p, out, num_threads(), in_turn); });
  Py_RETURN_NONE;
}

// Reads a number that fp32 can hold, also in base 2, or None. False where it is neither.
bool read_number(PyObject* from, std::optional<double>& to) {
  if (from == Py_None) return true;
  if (Py_TYPE(from) != &PyFloat_Type) return false;
  to = PyFloat_AsDouble(from);
  return *to == 0 || (std::abs(*to) > 0x1p-150 && std::abs(*to) <= 2.35e38);
}

// Reads a plain tensor whose gradient is not wanted, or None. False where it is neither.
bool read_constant(PyObject* from, const char* name, MaybeTensor& to) {
  if (from == Py_None) return true;
  if (!Tensor::is_plain(from) || Tensor::wants_gradient(from)) return false;
  to.emplace(Object::borrowed(from), name);
  return true;
}

// Whether there are hooks, such as a checkpoint's, that are told of each tensor that is saved for a backward.
bool saving_is_watched() {
  return !Object::result(PyObject_CallFunctionObjArgs(torch_.hooks_of_saving, Py_False, nullptr)).is_none();
}

bool has_plain_tensors(const Object& mask) {
  const auto is_plain = [](const Object& x) { return x.is_none() || Tensor::is_plain(x.get()); };
  const Object q_offset = mask.attribute(names().q_offset), ids = mask.attribute(names().segment_ids);
  if (!PyLong_Check(q_offset.get()) && !is_plain(q_offset)) return false;
  if (!ids.is_none()) {
    const auto [of_queries, of_keys] = two_of(ids);
    if (!is_plain(of_queries) || !is_plain(of_keys)) return false;
  }
  return is_plain(mask.attribute(names().real_queries)) && is_plain(mask.attribute(names().real_keys)) &&
         is_plain(mask.attribute(names().dense));
}

// The spec of a Mask or None, scale, bias, softcap, alibi_slopes, sinks; none where PyTorch has to do with one of them.
std::optional<Spec> read_spec(Arguments in, int64_t head_dim) {
  std::optional<double> scale;
  Spec spec{Object::borrowed(in[0])};
  const bool read = read_number(in[1], scale) && read_constant(in[2], "bias", spec.bias) &&
                    read_number(in[3], spec.softcap) && read_constant(in[4], "alibi_slopes", spec.alibi_slopes) &&
                    read_constant(in[5], "sinks", spec.sinks);
  if (!read || (spec.softcap && *spec.softcap <= 0) || !(spec.mask.is_none() || has_plain_tensors(spec.mask)))
    return {};
  spec.scale = scale ? *scale : std::pow(head_dim, -0.5);
  return spec;
}

// Calls of fastattn.attention with which PyTorch has nothing to do but to keep what the gradients of q, k and v need.
// Returns (o, lse, weights, whether such gradients are wanted), with None for what is not asked for, but lse is there
// where they are; None for any other call, right or wrong: what it takes is for the general road to find out.
// Arguments: q, k, v, a Mask or None, scale, bias, softcap, alibi_slopes, sinks; whether lse is asked for; None, or,
// where the weights are, whether they are averaged over the heads.
PyObject* attend(Arguments in) {
  try {
    for (int i = 0; i < 3; ++i) {
      if (!Tensor::is_plain(in[i])) Py_RETURN_NONE;
    }
    const Tensor q(Object::borrowed(in[0]), "q"), k(Object::borrowed(in[1]), "k"), v(Object::borrowed(in[2]), "v");
    if (q.dim() != 4 || q.numel() == 0 || v.dim() != 4 || v.numel() == 0) Py_RETURN_NONE;
    const auto spec = read_spec(in + 3, q.size(3));
    if (!spec) Py_RETURN_NONE;
    const bool wanted = std::any_of(in, in + 3, Tensor::wants_gradient);
    if (wanted && saving_is_watched()) Py_RETURN_NONE;
    const auto average_heads = in[10] == Py_None ? std::optional<bool>() : in[10] == Py_True;
    const Call call(q, k, v, *spec);
    const auto [o, lse, weights] = outputs_of(call, q, v, in[9] == Py_True || wanted, average_heads);
    return PyTuple_Pack(4, o.get(), lse.get(), weights.get(), wanted ? Py_True : Py_False);
  } catch (const NotImplemented&) {
  } catch (const std::invalid_argument&) {
  }
  Py_RETURN_NONE;
}

// Pages [pages, keys of a page, H_kv, D], or their scales without the last, with the heads before the keys.
Tensor heads_first(const Tensor& pages) {
  Sizes sizes, strides;
  for (int64_t i = 0; i < pages.dim(); ++i) {
    const int64_t from = i == 1 ? 2 : i == 2 ? 1 : i;
    sizes.push_back(pages.size(from)), strides.push_back(pages.stride(from));
  }
  return pages.viewed(sizes, strides);
}

// Whether there are rows of so many new tokens in the dtype of q, [tokens, H_kv, D], that can be written to pages
// [pages, keys of a page, H_kv, D], and their scales, if these have such.
bool fit_in_pages(const MaybeTensor& rows, int64_t tokens, const Tensor& pages, const MaybeTensor& scales,
                  const Tensor& q) {
  return rows && rows->has_sizes({tokens, pages.size(2), pages.size(3)}) && rows->same_dtype(q) && rows->has_rows() &&
         pages.is_writable() && (!scales || scales->is_writable());
}

// Writes row i to the row in_page[i] of the page page[i].
void write_to_pages(const Tensor& rows, const Tensor& pages, const MaybeTensor& scales, const DecodeKernels& kernels,
                    const int64_t* page, const int64_t* in_page) {
  const int64_t size = rows.element_size(), d = rows.size(2);
  const auto place = [&](const Tensor& x, int64_t i, int64_t h) {
    return x.data() + (page[i] * x.stride(0) + in_page[i] * x.stride(1) + h * x.stride(2)) * x.element_size();
  };
  for (int64_t i = 0; i < rows.size(0); ++i) {
    for (int64_t h = 0; h < rows.size(1); ++h) {
      const char* const row = rows.data() + (i * rows.stride(0) + h * rows.stride(1)) * size;
      char* const to = place(pages, i, h);
      if (scales) {
        const bool is_float8 = pages.is(kDLFloat8_e4m3fn, 8);
        const float scale = kernels.quantize(*rows.dtype(), row, d, is_float8, reinterpret_cast<int8_t*>(to));
        std::memcpy(place(*scales, i, h), &scale, sizeof(scale));
      } else {
        std::memcpy(to, row, d * size);
      }
    }
  }
}

// Calls of fastattn.attention_paged with which PyTorch has nothing to do, whose requests have as many queries each.
// Returns o [B * n, H, d_v]; None, as `attend` does, for any other call. Arguments: q [B * n, H, D], k and v in pages
// [pages, keys of a page, H_kv, D], a Mask, scale, None, softcap, alibi_slopes, sinks; int32 [B, pages of a request];
// the scales of k and v, or None; the keys and values of the tokens of q, which are written to pages first, or None;
// and int64 [B * n] twice: their pages, and their rows there; n.
PyObject* attend_paged(Arguments in) {
  try {
    std::array<MaybeTensor, 8> given;
    constexpr const char* kNames[] = {"q", "k_pages", "v_pages", "block_table", "k_scales", "v_scales", "k", "v"};
    constexpr int kPlaces[] = {0, 1, 2, 9, 10, 11, 12, 13};
    for (int i = 0; i < 8; ++i) {
      if (!read_constant(in[kPlaces[i]], kNames[i], given[i])) Py_RETURN_NONE;
    }
    const auto& [q, k, v, table, k_scales, v_scales, new_k, new_v] = given;
    if (!q || !k || !v || !table || q->dim() != 3 || k->dim() != 4 || v->dim() != 4 || table->dim() != 2 ||
        !q->has_rows() || !k->has_rows() || !v->has_rows() || q->numel() == 0 || v->numel() == 0) {
      Py_RETURN_NONE;
    }
    const auto spec = read_spec(in + 3, q->size(2));
    const int64_t tokens = q->size(0), B = table->size(0), H = q->size(1), n = integer(in[16]);
    if (!spec || n * B != tokens || !k->same_dtype(*v)) Py_RETURN_NONE;
    std::array<MaybeTensor, 2> scales;
    if (k_scales || v_scales) {
      if (!k_scales || !v_scales || k_scales->dim() != 3 || v_scales->dim() != 3) Py_RETURN_NONE;
      scales = {heads_first(*k_scales), heads_first(*v_scales)};
    }
    const int64_t stride = q->stride(0);
    const Call call(q->viewed({B, H, n, q->size(2)}, {n * stride, q->stride(1), stride, q->stride(2)}), heads_first(*k),
                    heads_first(*v), *spec, *table, scales);
    const Capability& capability = choose_capability();
    if (new_k || new_v) {
      if (!fit_in_pages(new_k, tokens, *k, k_scales, *q) || !fit_in_pages(new_v, tokens, *v, v_scales, *q)) {
        Py_RETURN_NONE;
      }
      for (const Tensor* rows : {&*new_k, &*new_v}) {
        if (rows->may_overlap(*k) || rows->may_overlap(*v)) Py_RETURN_NONE;
      }
      const Tensor pages(Object::borrowed(in[14]), "pages"), rows(Object::borrowed(in[15]), "rows");
      const auto* const to_page = pages.output<const int64_t>({tokens}, kDLInt, 64);
      const auto* const to_row = rows.output<const int64_t>({tokens}, kDLInt, 64);
      const DecodeKernels& kernels = *capability.kernels_for(DType::f32).decode;
      write_to_pages(*new_k, *k, k_scales, kernels, to_page, to_row);
      write_to_pages(*new_v, *v, v_scales, kernels, to_page, to_row);
    }
    const Params& p = call.params();
    const Object sizes = Object::result(Py_BuildValue("(LLL)", tokens, H, p.d_v));
    const Tensor o(Object::result(PyObject_CallMethodObjArgs(q->object(), torch_.new_empty, sizes.get(), nullptr)),
                   "o");
    const std::unique_ptr<float[]> lse(new float[tokens * H]);
    const ForwardOutputs out{{o.data(), p.q.dtype, n * H * p.d_v, p.d_v, H * p.d_v}, lse.get()};
    without_gil([&] { run_forward(capability, p, out, num_threads(), in_turn, in_shares); });
    return Py_NewRef(o.object());
  } catch (const NotImplemented&) {
  } catch (const std::invalid_argument&) {
  }
  Py_RETURN_NONE;
}

// The backward of `attend`, as gradients_of; None where do or dlse is more than its memory, or what was given does not
// fit any more: for the general road. Arguments: do, dlse, q, k, v, o, lse, the terms of `attend`, which are wanted.
PyObject* attend_backward(Arguments in) {
  const auto is_plain = [](PyObject* x) { return x == Py_None || Tensor::is_plain(x); };
  if (!is_plain(in[0]) || !is_plain(in[1])) Py_RETURN_NONE;
  try {
    const Tensor q(Object::borrowed(in[2]), "q");
    if (q.dim() != 4) Py_RETURN_NONE;
    const auto spec = read_spec(in + 7, q.size(3));
    PyObject* const no_sums[] = {Py_None, Py_None, Py_None, Py_None};
    if (spec) return gradients_of({in[2], in[3], in[4], *spec}, in, in[13], no_sums);
  } catch (const std::invalid_argument&) {
  }
  Py_RETURN_NONE;
}

// Writes bool [B, H, n_q, n_k], by the lists, ranges, gaps and tiles that the kernels walk, for blocks of `block`
// queries: the tests compare it with Mask.keep. Arguments: q, k, spec, block, what is written.
PyObject* keep(Arguments in) {
  const Call call(in[0], in[1], in[1], in[2]);
  const Params& p = call.params();
  const int64_t block = integer(in[3]);
  const Tensor written(Object::borrowed(in[4]), "keep");
  bool* const result = written.output<bool>({p.B, p.H, p.n_q, p.n_k}, kDLBool, 8);
  const auto sees = [&](int64_t b, int64_t h, int64_t query, int64_t key) {
    uint32_t gaps = p.gaps(b, h, query);
    const MaskTile tile = gaps & kDenseGaps ? p.mask_tiles.joint(b, h, query, query, key, key) : kPartial;
    if (tile == kFull) gaps &= ~kDenseGaps;
    return tile != kSkipped && p.visible(b, h, query).contains(key) && !p.in_gap(gaps, b, h, query, key);
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
        gaps |= p.gaps(b, h, queries.at(i));
      }
      for (int64_t i = first; i < end; ++i) {
        bool* row = result + (head * p.n_q + queries.at(i)) * p.n_k;
        const int64_t last = keys.lower_bound(range.some.end);
        for (int64_t j = keys.lower_bound(range.some.begin); j < last; ++j) {
          row[keys.at(j)] = (!gaps && range.all.contains(keys.at(j))) || sees(b, h, queries.at(i), keys.at(j));
        }
      }
    }
  }
  Py_RETURN_NONE;
}

// For the benchmarks: takes so many steps of fma_chains in every thread, and returns how many operations they are.
PyObject* fma_ceiling(Arguments in) {
  const int64_t steps = integer(in[0]), threads = num_threads();
  const Kernels& kernels = choose_capability().kernels_for(DType::f32);
  without_gil([&] { parallel_for(threads, 1, [&](int64_t, int64_t) { kernels.fma_chains(steps); }); });
  return PyFloat_FromDouble(double(threads) * steps * kernels.chain_operations);
}

// For the tests: philox.h against published answers. Arguments: the seed, and the four words of the counter.
PyObject* philox_words(Arguments in) {
  std::array<uint32_t, 4> counter;
  for (int i = 0; i < 4; ++i) counter[i] = static_cast<uint32_t>(integer(in[1 + i]));
  const PhiloxWords words = philox(philox_key(integer(in[0])), {counter[0], counter[1], counter[2], counter[3]});
  return Py_BuildValue("IIII", words.x0, words.x1, words.x2, words.x3);
}

// The name of the instruction set in use.
PyObject* capability(Arguments) { return PyUnicode_FromString(choose_capability().name()); }

// The names of all that this module has kernels for, of those that run here, and of the compiler.
PyObject* build_info(Arguments) {
  Object compiled = Object::result(PyList_New(0)), runs_here = Object::result(PyList_New(0));
  for (const Capability& each : capabilities()) {
    const Object name = Object::result(PyUnicode_FromString(each.name()));
    PyList_Append(compiled.get(), name.get());
    if (each.runs_here) PyList_Append(runs_here.get(), name.get());
  }
  return Py_BuildValue("{sOsOss}", "compiled_for", compiled.get(), "runs_here", runs_here.get(), "compiler",
                       __VERSION__);
}

// `function` as Python calls it, with so many arguments.
template <PyObject* (*function)(Arguments), Py_ssize_t count>
PyObject* called(PyObject*, Arguments arguments, Py_ssize_t given) {
  try {
    if (given == count) return function(arguments);
    PyErr_Format(PyExc_TypeError, "must have %zd arguments, got %zd", count, given);
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const NotImplemented& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*function)(Arguments), Py_ssize_t count>
PyMethodDef method(const char* name) {
  constexpr auto function_of_python = &called<function, count>;
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function_of_python)), METH_FASTCALL,
          nullptr};
}

PyMethodDef methods[] = {
    method<forward, 4>("forward"),
    method<forward_paged, 7>("forward_paged"),
    method<backward, 15>("backward"),
    method<weights, 5>("weights"),
    method<received, 4>("received"),
    method<top_keys, 5>("top_keys"),
    method<attend, 11>("attend"),
    method<attend_backward, 14>("attend_backward"),
    method<attend_paged, 17>("attend_paged"),
    method<keep, 5>("keep"),
    method<fma_ceiling, 1>("fma_ceiling"),
    method<philox_words, 5>("philox"),
    method<capability, 0>("capability"),
    method<build_info, 0>("build_info"),
    {},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyObject* import_module(Arguments) {
  import_torch();
  return PyModule_Create(&module);
}

}  // namespace
}  // namespace fastattn

PyMODINIT_FUNC PyInit__cpu() { return fastattn::called<fastattn::import_module, 0>(nullptr, nullptr, 0); }
