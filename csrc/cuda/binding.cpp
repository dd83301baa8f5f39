// The module fastattn._cuda: plain functions over tensors, compiled by the C++ compiler.
// fastattn/backends/cuda.py calls them, and allocates what they write.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <variant>

#include "../dtype_of_tensor.h"
#include "kernels.h"

namespace fastattn::cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Whether the kernels can copy the rows of x [B, H, N, D] in chunks of so many bytes.
bool is_in_chunks(const Tensor& x, int64_t bytes = 16) {
  const auto whole = [&](int64_t elements) { return elements * x.element_size() % bytes == 0; };
  return x.stride(3) == 1 && whole(x.size(3)) && whole(x.stride(0)) && whole(x.stride(1)) && whole(x.stride(2)) &&
         reinterpret_cast<uintptr_t>(x.data_ptr()) % bytes == 0;
}

Rows rows_anywhere(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

Rows rows_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 4 && is_in_chunks(x),
                    "tensors must be [B, H, N, D] in rows of multiples of 16 bytes, got shape ", x.sizes(),
                    ", strides ", x.strides());
  return rows_anywhere(x);
}

Rows rows_or_null(const MaybeTensor& x) { return x ? rows_of(*x) : Rows{}; }

template <class T>
T* data_or_null(const MaybeTensor& x) {
  TORCH_CHECK_VALUE(!x || x->is_contiguous(), "tables must be contiguous, got strides ", x->strides());
  return x ? x->data_ptr<T>() : nullptr;
}

// Pages of the dtype of q; or with scales, float [pages, H_kv, page_size], of int8 or float8_e4m3fn.
PagedRows paged_rows_of(const Tensor& x, const Tensor& table, const MaybeTensor& scales, const Tensor& q) {
  PagedRows result{rows_anywhere(x),         x.stride(3),    is_in_chunks(x, 16 / q.element_size() * x.element_size()),
                   data_or_null<int>(table), int(x.size(2)), int(x.size(0))};
  if (scales) {
    result.stored = x.scalar_type() == at::kChar ? Stored::int8 : Stored::float8_e4m3fn;
    result.scales = {scales->const_data_ptr<float>(), scales->stride(0), scales->stride(1), scales->stride(2)};
  }
  return result;
}

// A tensor that Python has expanded to [B, H, n_q, n_k].
Table table_or_null(const MaybeTensor& x) {
  return x ? Table{x->const_data_ptr(), x->stride(0), x->stride(1), x->stride(2), x->stride(3)} : Table{};
}

// The same of entries by the distance from query to key, [B, H, 1, n_q + n_k - 1]: the row of a query begins an entry
// before that of the query before, and that of the last one where the entries do.
Table table_by_distance(const Tensor& x, int64_t n_q) {
  const int64_t stride = x.stride(3);
  const auto* first = static_cast<const char*>(x.const_data_ptr()) + (n_q - 1) * stride * x.element_size();
  return {first, x.stride(0), x.stride(1), -stride, stride};
}

// The queries or the keys of a Mask of fastattn/spec.py: bool, int64 and int64 [B, n].
struct SideTensors {
  MaybeTensor real, documents, positions;
};

struct Mask {
  bool causal;
  std::optional<int64_t> left, right;
  std::variant<Tensor, int64_t> q_offset;  // int64 [B], or one for all
  SideTensors queries, keys;
  MaybeTensor dense;  // bool [B, H, n_q, n_k]
};

struct Scores {
  double scale;
  std::optional<double> softcap;
  MaybeTensor bias;  // [B, H, n_q, n_k]; by distance [B, H, 1, n_q + n_k - 1]
  bool bias_by_distance;
  MaybeTensor alibi_slopes;  // float [B, H]
  MaybeTensor sinks;         // float [H]
  double dropout_p;
  MaybeTensor seed;    // int64 scalar
  MaybeTensor places;  // int32 [2 + n_q + ceil(n_k / 4)]
};

// Params, and the memory that they point to.
class CallParams {
  Tensor groups_of_queries_, groups_of_keys_;

 public:
  Params params{};

  // With a table k and v are pages, of which these params know only how many keys there are.
  CallParams(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, const Scores& scores,
             const MaybeTensor& table = {}) {
    Params& p = params;
    p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1), p.d_qk = k.size(3), p.d_v = v.size(3);
    TORCH_CHECK_VALUE(std::max(p.d_qk, p.d_v) <= kMostColumns, "head dims must be at most ", kMostColumns, ", got ",
                      p.d_qk, " and ", p.d_v);
    p.dtype = dtype_of(q);
    p.q = rows_of(q);
    if (!table) p.k = rows_of(k), p.v = rows_of(v);
    p.queries.n = q.size(2);
    p.keys.n = !table ? k.size(2) : k.size(0) > 0 ? table->size(1) * k.size(2) : 0;  // where no page is, no key is
    groups_of_queries_ = describe(p.queries, mask.queries, q.options());
    groups_of_keys_ = describe(p.keys, mask.keys, q.options());
    if (const auto* same_for_all = std::get_if<int64_t>(&mask.q_offset)) {
      p.queries.offset = *same_for_all;
    } else {
      p.queries.offsets = data_or_null<int64_t>(std::get<Tensor>(mask.q_offset));
    }
    p.band = make_band(mask.causal, mask.left.value_or(kNoLimit), mask.right.value_or(kNoLimit));
    p.dense = table_or_null(mask.dense);
    p.bias_by_distance = scores.bias_by_distance;
    p.bias = p.bias_by_distance ? table_by_distance(*scores.bias, p.queries.n) : table_or_null(scores.bias);
    if (scores.bias) p.bias_dtype = dtype_of(*scores.bias);
    p.scale = static_cast<float>(scores.scale);
    if (scores.softcap) p.softcap = static_cast<float>(std::clamp(*scores.softcap, kLeastSoftcap, kMostSoftcap));
    p.alibi_slopes = data_or_null<float>(scores.alibi_slopes);
    p.sinks = data_or_null<float>(scores.sinks);
    p.dropout = make_dropout(scores.dropout_p, 0);
    p.dropout.places = {data_or_null<int32_t>(scores.places), p.queries.n};
    p.seed = data_or_null<int64_t>(scores.seed);
    p.score_scale = p.is_general() ? ScoreScale{p.scale, float(kLog2E)} : split_scale(scores.scale);
  }

 private:
  Tensor describe(Side& side, const SideTensors& tensors, const at::TensorOptions& options) {
    side.real = data_or_null<bool>(tensors.real);
    side.document = data_or_null<int64_t>(tensors.documents);
    side.position = data_or_null<int64_t>(tensors.positions);
    if (!side.real && !side.document && !side.position) return {};
    const Tensor groups =
        at::empty({params.B * side.group_count() * int64_t(sizeof(Tokens))}, options.dtype(at::kByte));
    side.groups = reinterpret_cast<Tokens*>(groups.data_ptr());
    return groups;
  }
};

// With a table, int [B, pages of a sample], k and v are pages [pages, H_kv, page_size, D or d_v] of any strides, and
// with scales, float [pages, H_kv, page_size], of int8 or float8_e4m3fn.
void forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& table, const MaybeTensor& k_scales,
             const MaybeTensor& v_scales, const Tensor& o, const Tensor& lse, const Mask& mask, const Scores& scores) {
  const c10::cuda::CUDAGuard guard(q.device());
  const CallParams call(q, k, v, mask, scores, table);
  const Params& p = call.params;
  // A row of the table may be longer because of another request, on which no bit is to depend.
  const int most_keys = table ? INT32_MAX : p.keys.n;
  ForwardParams f{p, Headroom::of(p.dtype, most_keys), rows_of(o), lse.data_ptr<float>()};
  if (table) f.paged_k = paged_rows_of(k, *table, k_scales, q), f.paged_v = paged_rows_of(v, *table, v_scales, q);
  f.parts = parts_of(p);
  Tensor rows_of_parts;
  if (f.parts.count > 1) {
    const int64_t rows = f.parts.count * lse.numel();
    f.parts.row_stride = p.d_v + p.d_v % 2;  // of whole pairs
    rows_of_parts = at::empty({rows * (f.parts.row_stride + 2)}, lse.options());
    f.parts.o = rows_of_parts.data_ptr<float>();
    f.parts.max = f.parts.o + rows * f.parts.row_stride;
    f.parts.sum = f.parts.max + rows;
  }
  C10_CUDA_CHECK(
      with_kernels_of(p.dtype, [&](auto kernels) { return kernels.forward(f, c10::cuda::getCurrentCUDAStream()); }));
}

// Gradients that are None are not computed.
struct Gradients {
  MaybeTensor dq, dk, dv;
  MaybeTensor ds_of_keys, ds_of_queries, ds_by_distance, p_by_distance;
  MaybeTensor d_bias;  // float [bias_B, bias_H, n_q, n_k]; by distance as in BackwardParams
};

// Rows and columns of a tile of d_bias by distance.
std::pair<int, int> bias_tile(const Tensor& q, const Tensor& v) {
  const int columns = std::max(q.size(3), v.size(3));
  return with_kernels_of(dtype_of(q), [&](auto kernels) { return kernels.bias_tile(columns); });
}

// Returns the stats of each query, float [B, H, kRowStats, n_q].
Tensor backward(const Tensor& d_o, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& o, const Tensor& lse, const Gradients& wanted, const Mask& mask, const Scores& scores) {
  const c10::cuda::CUDAGuard guard(q.device());
  const CallParams call(q, k, v, mask, scores);
  const Params& p = call.params;
  const Tensor stats = at::empty({p.B, p.H, kRowStats, padded(p.queries.n)}, lse.options());
  BackwardParams g{p};
  g.o = rows_of(o), g.d_o = rows_of(d_o);
  g.lse = data_or_null<float>(lse), g.d_lse = data_or_null<float>(d_lse);
  g.stats = {stats.data_ptr<float>(), stats.size(3)};
  g.dq = rows_or_null(wanted.dq), g.dk = rows_or_null(wanted.dk), g.dv = rows_or_null(wanted.dv);
  g.ds_of_keys = data_or_null<float>(wanted.ds_of_keys);
  g.ds_of_queries = data_or_null<float>(wanted.ds_of_queries);
  g.ds_by_distance = data_or_null<float>(wanted.ds_by_distance);
  g.p_by_distance = data_or_null<float>(wanted.p_by_distance);
  g.d_bias = data_or_null<float>(wanted.d_bias);
  if (wanted.d_bias) g.bias_B = wanted.d_bias->size(0), g.bias_H = wanted.d_bias->size(1);
  C10_CUDA_CHECK(
      with_kernels_of(p.dtype, [&](auto kernels) { return kernels.backward(g, c10::cuda::getCurrentCUDAStream()); }));
  return stats.narrow(3, 0, p.queries.n);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<SideTensors>(m, "Side").def(py::init<MaybeTensor, MaybeTensor, MaybeTensor>(), py::kw_only(),
                                         py::arg("real"), py::arg("documents"), py::arg("positions"));
  py::class_<Mask>(m, "Mask").def(
      py::init([](bool causal, std::optional<int64_t> left, std::optional<int64_t> right,
                  const std::variant<Tensor, int64_t>& q_offset, const SideTensors& queries, const SideTensors& keys,
                  const MaybeTensor& dense) { return Mask{causal, left, right, q_offset, queries, keys, dense}; }),
      py::kw_only(), py::arg("causal"), py::arg("left"), py::arg("right"), py::arg("q_offset"), py::arg("queries"),
      py::arg("keys"), py::arg("dense"));
  py::class_<Scores>(m, "Scores")
      .def(py::init([](double scale, std::optional<double> softcap, const MaybeTensor& bias, bool bias_by_distance,
                       const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, double dropout_p,
                       const MaybeTensor& seed, const MaybeTensor& places) {
             return Scores{scale, softcap, bias, bias_by_distance, alibi_slopes, sinks, dropout_p, seed, places};
           }),
           py::kw_only(), py::arg("scale"), py::arg("softcap"), py::arg("bias"), py::arg("bias_by_distance"),
           py::arg("alibi_slopes"), py::arg("sinks"), py::arg("dropout_p"), py::arg("seed"), py::arg("places"));
  py::class_<Gradients>(m, "Gradients")
      .def(py::init([](const MaybeTensor& dq, const MaybeTensor& dk, const MaybeTensor& dv,
                       const MaybeTensor& ds_of_keys, const MaybeTensor& ds_of_queries,
                       const MaybeTensor& ds_by_distance, const MaybeTensor& p_by_distance, const MaybeTensor& d_bias) {
             return Gradients{dq, dk, dv, ds_of_keys, ds_of_queries, ds_by_distance, p_by_distance, d_bias};
           }),
           py::kw_only(), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("ds_of_keys"), py::arg("ds_of_queries"),
           py::arg("ds_by_distance"), py::arg("p_by_distance"), py::arg("d_bias"));
  m.def("bias_tile", &bias_tile);
  m.def("forward", &forward, without_gil);
  m.def("backward", &backward, without_gil);
}

}  // namespace fastattn::cuda
