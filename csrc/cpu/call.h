// A call of fastattn in the form that the kernels take, from tensors and a Spec of fastattn/spec.py.
#pragma once

#include <Python.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "mask_tables.h"
#include "params.h"
#include "tensors.h"

namespace fastattn {
namespace {

// Names of attributes, interned once: a look-up by them makes no string.
struct Names {
  PyObject *mask = of("mask"), *causal = of("causal"), *q_offset = of("q_offset"), *window = of("window"),
           *real_queries = of("real_queries"), *real_keys = of("real_keys"), *segment_ids = of("segment_ids"),
           *dense = of("dense"), *scale = of("scale"), *softcap = of("softcap"), *bias = of("bias"),
           *alibi_slopes = of("alibi_slopes"), *sinks = of("sinks"), *dropout_p = of("dropout_p"), *seed = of("seed"),
           *places = of("places"), *bias_by_distance = of("bias_by_distance");

  static PyObject* of(const char* name) { return PyUnicode_InternFromString(name); }
};

const Names& names() {
  static const Names& names = *new Names;
  return names;
}

void raise_if_error() {
  if (PyErr_Occurred()) throw PythonError();
}

int64_t integer(PyObject* from) {
  const int64_t value = PyLong_AsLongLong(from);
  raise_if_error();
  return value;
}

double number(PyObject* from) {
  const double value = PyFloat_AsDouble(from);
  raise_if_error();
  return value;
}

bool truth(PyObject* from) {
  const int value = PyObject_IsTrue(from);
  raise_if_error();
  return value;
}

MaybeTensor maybe_tensor(const Object& from, const char* name) {
  return from.is_none() ? MaybeTensor() : MaybeTensor(Tensor(from, name));
}

std::optional<int64_t> maybe_integer(PyObject* from) {
  return from == Py_None ? std::optional<int64_t>() : integer(from);
}

Object item(PyObject* tuple, int i) {
  PyObject* const result = PyTuple_GetItem(tuple, i);
  if (!result) throw PythonError();
  return Object::borrowed(result);
}

std::array<Object, 2> two_of(const Object& pair) { return {item(pair.get(), 0), item(pair.get(), 1)}; }

// A Spec of fastattn/spec.py, or the arguments of fastattn.attention that make one.
struct Spec {
  Object mask;  // or none of it: every key is visible
  double scale;
  std::optional<double> softcap;
  MaybeTensor bias, alibi_slopes, sinks;
  double dropout_p = 0;
  MaybeTensor seed, places;
  bool bias_by_distance = false;
};

Spec spec_of(PyObject* pointer) {
  const Object from = Object::borrowed(pointer);
  const Object softcap = from.attribute(names().softcap);
  return {from.attribute(names().mask),
          number(from.attribute(names().scale).get()),
          softcap.is_none() ? std::optional<double>() : number(softcap.get()),
          maybe_tensor(from.attribute(names().bias), "bias"),
          maybe_tensor(from.attribute(names().alibi_slopes), "alibi_slopes"),
          maybe_tensor(from.attribute(names().sinks), "sinks"),
          number(from.attribute(names().dropout_p).get()),
          maybe_tensor(from.attribute(names().seed), "seed"),
          maybe_tensor(from.attribute(names().places), "places"),
          truth(from.attribute(names().bias_by_distance).get())};
}

// A call in the form that the kernels take; it keeps the tensors and the tables that `params` points to.
class Call {
 public:
  Call(PyObject* q, PyObject* k, PyObject* v, PyObject* spec) : Call(q, k, v, spec_of(spec)) {}

  Call(PyObject* q, PyObject* k, PyObject* v, const Spec& spec)
      : Call({Object::borrowed(q), "q"}, {Object::borrowed(k), "k"}, {Object::borrowed(v), "v"}, spec) {}

  // block_table: int32 [B, pages of a sample], where k and v are pages [pages, H_kv, keys of a page, D]. scales: of k
  // and v where those are of int8 or float8_e4m3fn, fp32 [pages, H_kv, keys of a page].
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Spec& spec, const MaybeTensor& block_table = {},
       const std::array<MaybeTensor, 2>& scales = {}) {
    const Input rows_of_q = input(q), rows_of_k = input(k, scales[0]), rows_of_v = input(v, scales[1]);
    const Tensor &q_ = held_[0], &k_ = held_[1], &v_ = held_[2];
    Params& p = params_;
    p.q = rows_of_q, p.k = rows_of_k, p.v = rows_of_v;
    p.B = q_.size(0), p.H = q_.size(1), p.H_kv = k_.size(1);
    p.n_q = q_.size(2), p.n_k = k_.size(2), p.d_qk = q_.size(3), p.d_v = v_.size(3);
    FASTATTN_CHECK((block_table || p.B == k_.size(0)) && p.d_qk == k_.size(3) && p.H_kv > 0 && p.H % p.H_kv == 0,
                   "k must be [B, H_kv, n_k, D] like q, where H_kv divides H, got q ", q_.sizes_text(), " and k ",
                   k_.sizes_text());
    v_.check_sizes({k_.size(0), p.H_kv, p.n_k, p.d_v});
    if (block_table) add_pages(*block_table);
    FASTATTN_CHECK((scales[0] || k_.same_dtype(q_)) && (scales[1] || v_.same_dtype(q_)), "k and v must be ",
                   q_.dtype_name(), " like q, got ", k_.dtype_name(), " and ", v_.dtype_name());
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    FASTATTN_CHECK(p.n_q <= kMost && p.n_k <= kMost, "n_q and n_k must be at most ", kMost, ", got ", p.n_q, " and ",
                   p.n_k);
    mask_.emplace(p.B, p.H, p.n_q, p.n_k, mask_params(spec.mask));
    mask_->describe(p);
    if (block_table) check_pages(k_.size(0));
    p.scale = spec.scale;
    if (spec.softcap) p.softcap = std::clamp(*spec.softcap, kLeastSoftcap, kMostSoftcap);
    add_terms(spec);
    if (spec.dropout_p > 0) add_dropout(spec);
  }

  const Params& params() const { return params_; }

  // Without values, for the kernels of weights.
  Params without_values() const {
    Params result = params_;
    result.d_v = 0;
    return result;
  }

 private:
  Input input(const Tensor& x, const MaybeTensor& scales = {}) {
    FASTATTN_CHECK(x.dim() == 4, x.name(), " must be [B, H, N, D], got ", x.sizes_text());
    const Tensor& rows = hold(x.in_rows());
    if (!scales) return rows_of<Input>(rows);
    const bool is_float8 = rows.is(kDLFloat8_e4m3fn, 8);
    FASTATTN_CHECK(is_float8 || rows.is(kDLInt, 8), rows.name(), " must be int8 or float8_e4m3fn with scales, got ",
                   rows.dtype_name());
    scales->check_sizes({rows.size(0), rows.size(1), rows.size(2)});
    FASTATTN_CHECK(scales->is(kDLFloat, 32), scales->name(), " must be float32, got ", scales->dtype_name());
    Input result{rows.data(), DType::i8, rows.stride(0), rows.stride(1), rows.stride(2)};
    result.is_float8 = is_float8, result.scales = reinterpret_cast<const float*>(scales->data());
    result.batch_stride_of_scales = scales->stride(0), result.head_stride_of_scales = scales->stride(1);
    result.row_stride_of_scales = scales->stride(2);
    return result;
  }

  const Tensor& hold(Tensor x) { return held_.emplace_back(std::move(x)); }

  void add_pages(const Tensor& block_table) {
    Params& p = params_;
    const int64_t pages_of_sample = block_table.dim() == 2 ? block_table.size(1) : 0;
    block_table.check_sizes({p.B, pages_of_sample});
    FASTATTN_CHECK(block_table.is(kDLInt, 32), "block_table must be int32, got ", block_table.dtype_name());
    const auto* const table = reinterpret_cast<const int32_t*>(hold(block_table.contiguous()).data());
    FASTATTN_CHECK(p.n_k > 0, "k must be pages of at least one key, got ", held_[1].sizes_text());
    for (Input* x : {&p.k, &p.v}) x->table = table, x->pages_of_sample = pages_of_sample, x->page_rows = p.n_k;
    p.n_k *= pages_of_sample;
  }

  // That there are the pages that hold the real keys: the others of the table are not looked at.
  void check_pages(int64_t pages) const {
    const Params& p = params_;
    for (int64_t b = 0; b < p.B; ++b) {
      const IndexList& keys = p.keys[b];
      for (int64_t i = 0, key; i < keys.count; i = keys.lower_bound((key / p.k.page_rows + 1) * p.k.page_rows)) {
        key = keys.at(i);
        const int64_t page = p.k.table[b * p.k.pages_of_sample + key / p.k.page_rows];
        FASTATTN_CHECK(0 <= page && page < pages, "block_table must have numbers of the ", pages, " pages, got ", page,
                       " for key ", key, " of sample ", b);
      }
    }
  }

  const bool* marks(const Object& mask, PyObject* name_in_mask, const char* name, int64_t n) {
    const auto x = maybe_tensor(mask.attribute(name_in_mask), name);
    if (!x) return nullptr;
    x->check_sizes({params_.B, n});
    FASTATTN_CHECK(x->is_bool(), name, " must be bool, got ", x->dtype_name());
    return reinterpret_cast<const bool*>(hold(x->contiguous()).data());
  }

  const int64_t* longs(const Tensor& x) {
    return reinterpret_cast<const int64_t*>(hold(x.as_long().contiguous()).data());
  }

  MaskParams mask_params(const Object& mask) {
    const int64_t B = params_.B, H = params_.H, n_q = params_.n_q, n_k = params_.n_k;
    MaskParams result;
    if (mask.is_none()) return result;
    result.causal = truth(mask.attribute(names().causal).get());
    const Object q_offset = mask.attribute(names().q_offset);
    if (PyLong_Check(q_offset.get())) {
      result.q_offset = integer(q_offset.get());
    } else {
      const Tensor offsets(q_offset, "q_offset");
      result.per_query_offset = offsets.dim() == 2;
      FASTATTN_CHECK(offsets.has_sizes(result.per_query_offset ? Sizes{B, n_q} : Sizes{B}), "q_offset must be [", B,
                     "] or [", B, ", ", n_q, "], got ", offsets.sizes_text());
      result.q_offsets = longs(offsets);
    }
    const auto [left, right] = two_of(mask.attribute(names().window));
    result.left = maybe_integer(left.get()), result.right = maybe_integer(right.get());
    result.real_queries = marks(mask, names().real_queries, "real_queries", n_q);
    result.real_keys = marks(mask, names().real_keys, "real_keys", n_k);
    if (const Object ids = mask.attribute(names().segment_ids); !ids.is_none()) {
      const auto [of_queries, of_keys] = two_of(ids);
      const Tensor ids_q(of_queries, "segment_ids"), ids_k(of_keys, "segment_ids");
      ids_q.check_sizes({B, n_q}), ids_k.check_sizes({B, n_k});
      result.ids_k = longs(ids_k);
      result.ids_q = ids_q.object() == ids_k.object() ? result.ids_k : longs(ids_q);
    }
    if (const auto dense = maybe_tensor(mask.attribute(names().dense), "dense")) {
      FASTATTN_CHECK(dense->is_bool(), "dense must be bool, got ", dense->dtype_name());
      result.dense = table(*dense, {B, H, n_q, n_k});
    }
    return result;
  }

  Table table(const Tensor& x, const Sizes& sizes) { return table_of(hold(x.in_table()), sizes); }

  void add_terms(const Spec& spec) {
    Params& p = params_;
    for (const MaybeTensor* x : {&spec.bias, &spec.alibi_slopes, &spec.sinks}) {
      FASTATTN_CHECK(!*x || (*x)->is_floating(), (*x)->name(), " must be a floating Tensor, got ", (*x)->dtype_name());
    }
    if (spec.bias) {
      const bool by_distance = spec.bias_by_distance;
      Tensor in_dtype = spec.bias->dtype() ? *spec.bias : spec.bias->as_float();
      if (by_distance && in_dtype.stride(-1) == 0) in_dtype = in_dtype.contiguous();  // each query begins elsewhere
      p.bias = table(in_dtype, by_distance ? Sizes{p.B, p.H, 1, p.n_q + p.n_k - 1} : Sizes{p.B, p.H, p.n_q, p.n_k});
      p.bias_dtype = *in_dtype.dtype();
      if (by_distance) p.bias = p.bias.by_distance(p.n_q, bytes_of(p.bias_dtype));
    }
    if (const auto& slopes = spec.alibi_slopes) {
      slopes->check_sizes(slopes->dim() == 1 ? Sizes{p.H} : Sizes{p.B, p.H});
      const Tensor in_fp32 = slopes->as_float().contiguous();
      const auto* const first = reinterpret_cast<const float*>(in_fp32.data());
      for (int64_t b = 0; b < p.B; ++b) {
        const float* const of_sample = first + (slopes->dim() == 1 ? 0 : b * p.H);
        slopes_.insert(slopes_.end(), of_sample, of_sample + p.H);
      }
      p.alibi_slopes = slopes_.data();
    }
    if (const auto& sinks = spec.sinks) {
      sinks->check_sizes({p.H});
      p.sinks = reinterpret_cast<const float*>(hold(sinks->as_float().contiguous()).data());
    }
  }

  void add_dropout(const Spec& spec) {
    Params& p = params_;
    FASTATTN_CHECK(spec.seed && spec.seed->is(kDLInt, 64) && spec.seed->numel() == 1,
                   "seed must be one int64 where dropout_p is above 0");
    p.dropout = make_dropout(spec.dropout_p, *reinterpret_cast<const int64_t*>(spec.seed->data()));
    if (!spec.places) return;
    spec.places->check_sizes({2 + p.n_q + (p.n_k + 3) / 4});
    FASTATTN_CHECK(spec.places->is(kDLInt, 32), "places must be int32, got ", spec.places->dtype_name());
    p.dropout.places = {reinterpret_cast<const int32_t*>(hold(spec.places->contiguous()).data()), p.n_q};
  }

  std::vector<Tensor> held_ = reserved();  // q, k, v, and what else is read
  std::optional<Mask> mask_;
  std::vector<float> slopes_;  // [B, H]
  Params params_{};

  static std::vector<Tensor> reserved() {
    std::vector<Tensor> result;
    result.reserve(16);  // references to those in it stay right
    return result;
  }
};

}  // namespace
}  // namespace fastattn
