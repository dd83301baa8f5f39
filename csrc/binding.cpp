// The module fastattn._native_cpu: plain functions of tensors and of a Spec of fastattn/spec.py, which return what they
// allocate. fastattn/backends/native calls them; fastattn/ops.py is where PyTorch is told.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/ranges.h"
#include "cpu/run.h"
#include "dtype_of_tensor.h"

namespace fastattn {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

template <class Rows>
Rows rows_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1),
                    "tensors must be [B, H, N, D] on the CPU with a last stride of 1, got shape ", x.sizes(),
                    ", strides ", x.strides(), " on ", x.device());
  return {static_cast<decltype(Rows::data)>(x.data_ptr()), dtype_of(x), x.stride(0), x.stride(1), x.stride(2)};
}

// Spec of fastattn/spec.py, and its Mask.
struct Spec {
  bool causal;
  std::variant<Tensor, int64_t> q_start;
  std::optional<int64_t> left, right;
  MaybeTensor real_queries, real_keys, ids_q, ids_k, dense;
  double scale;
  std::optional<double> softcap;
  MaybeTensor bias, alibi_slopes, sinks;
  double dropout_p;
  MaybeTensor seed;
};

// `x` with the elements of a row side by side, copied if they are not.
Tensor with_rows(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous(); }
MaybeTensor with_rows(const MaybeTensor& x) { return x ? MaybeTensor(with_rows(*x)) : x; }

float* floats_or_null(const MaybeTensor& x) { return x ? x->data_ptr<float>() : nullptr; }

void check_sizes(const Tensor& x, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
}

void check_on_cpu(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.layout() == at::kStrided, name, " must be dense on the CPU, got ",
                    x.layout(), " on ", x.device());
}

void check_table(const MaybeTensor& x, int64_t B, int64_t n, const char* name) {
  if (x) check_on_cpu(*x, name), check_sizes(*x, {B, n}, name);
}

// The ids of the documents that the queries and the keys belong to.
struct Documents {
  MaybeTensor queries, keys;  // contiguous, int64

  Documents(const MaybeTensor& of_queries, const MaybeTensor& of_keys) {
    if (!of_keys) return;
    keys = of_keys->to(at::kLong).contiguous();
    queries = of_queries->is_same(*of_keys) ? keys : of_queries->to(at::kLong).contiguous();
  }

  bool shared() const { return queries->is_same(*keys); }
};

// The rows of every batch entry that are not padding: marked as real, and of a document.
class RealRows {
 public:
  RealRows(const MaybeTensor& marks, const MaybeTensor& documents, int64_t B, int64_t n)
      : tables_(B), lists_(B, IndexList{nullptr, 0, n}) {
    if (!marks && !documents) return;
    check_table(marks, B, n, "real_queries and real_keys");
    check_table(documents, B, n, "segments");
    const Tensor contiguous = marks ? marks->contiguous() : Tensor();
    const bool* mark = marks ? contiguous.const_data_ptr<bool>() : nullptr;
    const int64_t* id = documents ? documents->const_data_ptr<int64_t>() : nullptr;
    for (int64_t b = 0; b < B; ++b) {
      lists_[b] = index_list(n, tables_[b], [&](int64_t i) {
        return (!mark || mark[b * n + i]) && (!id || id[b * n + i] >= 0);
      });
    }
  }

  const IndexList* lists() const { return lists_.data(); }

 private:
  std::vector<std::vector<int32_t>> tables_;
  std::vector<IndexList> lists_;
};

// `x`, which broadcasts to these sizes, as a view of them whose rows lie side by side or are one entry for all keys.
Tensor expanded(const Tensor& x, at::IntArrayRef sizes, const char* name) {
  check_on_cpu(x, name);
  return (x.dim() == 0 ? x.reshape({1}) : with_rows(x)).expand(sizes);
}

// A tensor [B, H, n_q, n_k] of `expanded`.
Table table_of(const Tensor& x) {
  const bool one_for_all_keys = x.stride(3) == 0;
  const int64_t bytes = x.element_size();
  return {static_cast<const char*>(x.const_data_ptr()), bytes * x.stride(0), bytes * x.stride(1), bytes * x.stride(2),
          one_for_all_keys};
}

// Mask of fastattn/spec.py, in the form that the kernels take.
class Mask {
 public:
  Mask(int64_t B, int64_t H, int64_t n_q, int64_t n_k, bool causal, std::optional<int64_t> left,
       std::optional<int64_t> right, const std::variant<Tensor, int64_t>& q_start, const MaybeTensor& real_queries,
       const MaybeTensor& real_keys, const MaybeTensor& ids_q, const MaybeTensor& ids_k, const MaybeTensor& dense)
      : B(B),
        H(H),
        n_q(n_q),
        n_k(n_k),
        band_(make_band(causal, left.value_or(kNoLimit), right.value_or(kNoLimit))),
        documents_(ids_q, ids_k),
        queries_(real_queries, documents_.queries, B, n_q),
        keys_(real_keys, documents_.keys, B, n_k) {
    set_q_start(q_start);
    if (documents_.keys) {
      set_documents();
    } else if (dense || each_query_starts_) {
      set_ranges([&](int64_t b, int64_t i) {
        const KeyRange keys = visible_keys(band_, position_of(i, start_of(b, i)), this->n_k);
        return RowRange{int32_t(keys.begin), int32_t(keys.end), kNoGaps};
      });
    }
    if (dense) set_dense(*dense);
    set_groups();
    if (documents_.keys && range_heads_ == 1) set_sections();
  }

  void describe(Problem& p) const {
    p.band = band_;
    p.q_start = q_start_.data();
    p.each_query_starts = each_query_starts_;
    p.queries = queries_.lists();
    p.keys = keys_.lists();
    if (dense_) p.dense = table_of(*dense_);
    if (!ranges_.empty()) {
      const int64_t groups = groups_of_head(), several = range_heads_ == 1 ? 0 : 1;
      p.ranges = {ranges_.data(),        groups_.data(),   range_heads_ * n_q, several * n_q,
                  range_heads_ * groups, several * groups, gaps_};
    }
    if (!section_lists_.empty()) p.sections = section_lists_.data();
    if (!document_of_query_.empty()) {
      p.documents = {document_of_query_.data(), document_of_key_.data(), rank_of_query_.data(), rank_of_key_.data()};
    }
  }

  const int64_t B, H, n_q, n_k;

 private:
  void set_q_start(const std::variant<Tensor, int64_t>& q_start) {
    if (const auto* same_for_all = std::get_if<int64_t>(&q_start)) {
      q_start_.assign(B, *same_for_all);
      return;
    }
    check_on_cpu(std::get<Tensor>(q_start), "q_start");
    const Tensor starts = std::get<Tensor>(q_start).to(at::kLong).contiguous();
    each_query_starts_ = starts.dim() == 2;
    TORCH_CHECK_VALUE(each_query_starts_ ? starts.sizes() == at::IntArrayRef({B, n_q})
                                         : starts.sizes() == at::IntArrayRef({B}),
                      "q_start must be [", B, "] or [", B, ", ", n_q, "], got ", starts.sizes());
    const int64_t* data = starts.const_data_ptr<int64_t>();
    q_start_.assign(data, data + starts.numel());
  }

  int64_t start_of(int64_t b, int64_t query) const { return q_start_[each_query_starts_ ? b * n_q + query : b]; }

  void set_documents() {
    const auto number = [&](DocumentsOfSample& sample, const Tensor& ids, int64_t b, int64_t n,
                            std::vector<int32_t>& document, std::vector<int32_t>& rank) {
      document.resize(B * n), rank.resize(B * n);
      sample.number(ids.const_data_ptr<int64_t>() + b * n, n, document.data() + b * n, rank.data() + b * n);
    };
    std::vector<DocumentsOfSample> samples(B);
    for (int64_t b = 0; b < B; ++b) {
      number(samples[b], *documents_.keys, b, n_k, document_of_key_, rank_of_key_);
      if (!documents_.shared()) number(samples[b], *documents_.queries, b, n_q, document_of_query_, rank_of_query_);
      samples[b].collect(document_of_key_.data() + b * n_k, rank_of_key_.data() + b * n_k, n_k);
    }
    if (documents_.shared()) document_of_query_ = document_of_key_, rank_of_query_ = rank_of_key_;
    set_ranges([&](int64_t b, int64_t i) {
      const int64_t position = position_of(rank_of_query_[b * n_q + i], start_of(b, i));
      return samples[b].visible(band_, document_of_query_[b * n_q + i], position);
    });
  }

  template <class RangeOf>
  void set_ranges(RangeOf range_of) {
    ranges_.resize(B * n_q);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t i = 0; i < n_q; ++i) {
        ranges_[b * n_q + i] = range_of(b, i);
        gaps_ |= ranges_[b * n_q + i].gaps;
      }
    }
  }

  int64_t groups_of_head() const { return (n_q + kRangeGroup - 1) / kRangeGroup; }

  void set_groups() {
    if (ranges_.empty()) return;
    const int64_t groups = groups_of_head();
    groups_.assign(B * range_heads_ * groups, KeyRange{n_k, 0});
    for (int64_t i = 0; i < int64_t(ranges_.size()); ++i) {
      KeyRange& of_group = groups_[i / n_q * groups + i % n_q / kRangeGroup];
      of_group = hull(of_group, {ranges_[i].begin, ranges_[i].end});
    }
  }

  void set_sections() {
    for (int64_t b = 0; b < B; ++b) {
      sections_.push_back(sections_of(&ranges_[b * n_q], queries_.lists()[b]));
      section_lists_.push_back({sections_.back().data(), int64_t(sections_.back().size())});
    }
  }

  // Narrows the ranges to what the rows of a dense mask show. Rows that serve several samples, heads or queries are
  // looked at once.
  void set_dense(const Tensor& dense) {
    TORCH_CHECK_VALUE(dense.scalar_type() == at::kBool && dense.sizes() == at::IntArrayRef({B, H, n_q, n_k}),
                      "dense must be bool [", B, ", ", H, ", ", n_q, ", ", n_k, "], got ", dense.sizes());
    dense_ = dense;
    const Table table = table_of(dense);
    const int64_t samples = table.batch_stride ? B : 1, rows = table.query_stride ? n_q : 1;
    range_heads_ = table.head_stride ? H : 1;
    std::vector<RowRange> shown(samples * range_heads_ * rows);
    at::parallel_for(0, int64_t(shown.size()), 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* row = table.row(i / rows / range_heads_, i / rows % range_heads_, i % rows);
        shown[i] = dense_range(reinterpret_cast<const bool*>(row), table.one_for_all_keys, n_k);
      }
    });
    const std::vector<RowRange> of_samples = std::move(ranges_);
    ranges_.resize(B * range_heads_ * n_q);
    for (int64_t i = 0; i < int64_t(ranges_.size()); ++i) {
      const int64_t b = i / n_q / range_heads_, h = i / n_q % range_heads_, query = i % n_q;
      const int64_t row = ((samples == 1 ? 0 : b) * range_heads_ + h) * rows + (rows == 1 ? 0 : query);
      ranges_[i] = both(of_samples[b * n_q + query], shown[row]);
      gaps_ |= ranges_[i].gaps;
    }
  }

  Band band_;
  std::vector<int64_t> q_start_;  // [B], or [B, n_q]
  bool each_query_starts_ = false;
  Documents documents_;
  RealRows queries_, keys_;
  MaybeTensor dense_;
  std::vector<RowRange> ranges_;  // [B, range_heads_, n_q]
  std::vector<KeyRange> groups_;  // [B, range_heads_, groups_of_head()]
  int64_t range_heads_ = 1;
  std::vector<std::vector<Section>> sections_;  // [B]
  std::vector<SectionList> section_lists_;
  uint32_t gaps_ = kNoGaps;
  std::vector<int32_t> document_of_query_, document_of_key_, rank_of_query_, rank_of_key_;
};

// A call in the form that the kernels take; it keeps the tensors and the tables that `params` points to.
class Call {
 public:
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Spec& spec)
      : q_(with_rows(checked(q, "q"))),
        k_(with_rows(checked(k, "k"))),
        v_(with_rows(checked(v, "v"))),
        mask_(q.size(0), q.size(1), q.size(2), k.size(2), spec.causal, spec.left, spec.right, spec.q_start,
              spec.real_queries, spec.real_keys, spec.ids_q, spec.ids_k,
              spec.dense ? MaybeTensor(expanded(*spec.dense, {q.size(0), q.size(1), q.size(2), k.size(2)}, "dense"))
                         : MaybeTensor()) {
    Problem& p = params_;
    p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1);
    p.n_q = q.size(2), p.n_k = k.size(2), p.d_qk = q.size(3), p.d_v = v.size(3);
    TORCH_CHECK_VALUE(p.B == k.size(0) && p.d_qk == k.size(3) && p.H_kv > 0 && p.H % p.H_kv == 0,
                      "k must be [B, H_kv, n_k, D] like q, where H_kv divides H, got q ", q.sizes(), " and k ", k.sizes());
    check_sizes(v, {p.B, p.H_kv, p.n_k, p.d_v}, "v");
    TORCH_CHECK_VALUE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                      "k and v must be ", q.scalar_type(), " like q, got ", k.scalar_type(), " and ", v.scalar_type());
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
      check_on_cpu(*spec.alibi_slopes, "alibi_slopes");
      slopes_ = spec.alibi_slopes->to(at::kFloat).expand({p.B, p.H}).contiguous();
      p.alibi_slopes = slopes_.const_data_ptr<float>();
    }
    if (spec.sinks) {
      check_on_cpu(*spec.sinks, "sinks"), check_sizes(*spec.sinks, {p.H}, "sinks");
      sinks_ = spec.sinks->to(at::kFloat).contiguous();
      p.sinks = sinks_.const_data_ptr<float>();
    }
    p.dropout = make_dropout(spec.dropout_p, spec.seed ? spec.seed->item<int64_t>() : 0);
  }

  const Problem& params() const { return params_; }

 private:
  static const Tensor& checked(const Tensor& x, const char* name) {
    check_on_cpu(x, name);
    TORCH_CHECK_VALUE(x.dim() == 4, name, " must be [B, H, N, D], got ", x.sizes());
    return x;
  }

  const Tensor q_, k_, v_;
  const Mask mask_;
  Tensor bias_, slopes_, sinks_;
  Problem params_{};
};

// for_each of csrc/cpu/run.h: a thread takes another i whenever it begins one, since items differ in length.
template <class Run>
void take_in_turn(int64_t n, int64_t scratch_floats, Run run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n);
  const Tensor scratch = at::empty({threads, scratch_floats}, at::kFloat);  // rows begin at cache lines, see Arena
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    float* own = scratch.data_ptr<float>() + thread * scratch_floats;
    for (int64_t i = next.fetch_add(1), after; i < n; i = after) {
      after = next.fetch_add(1);
      run(i, after, own);
    }
  });
}
constexpr auto in_turn = [](int64_t n, int64_t scratch_floats, auto run) { take_in_turn(n, scratch_floats, run); };

// The same for items that are worth little more than the memory they read: each thread has a share of them that follow
// each other, as PyTorch cuts what it writes, so that a cache that was just written is read by the cores that have it.
// Whoever is done helps the others.
template <class Run>
void take_shares(int64_t n, int64_t scratch_floats, Run run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n);
  const Tensor scratch = at::empty({threads, scratch_floats}, at::kFloat);
  std::vector<std::atomic<int64_t>> next(threads);
  for (int64_t share = 0; share < threads; ++share) next[share] = share * n / threads;
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    float* own = scratch.data_ptr<float>() + thread * scratch_floats;
    for (int64_t turn = 0; turn < threads; ++turn) {
      const int64_t share = (thread + turn) % threads, end = (share + 1) * n / threads;
      for (int64_t i; (i = next[share].fetch_add(1)) < end;) run(i, n, own);
    }
  });
}
constexpr auto in_shares = [](int64_t n, int64_t scratch_floats, auto run) { take_shares(n, scratch_floats, run); };

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

// Heads that share a bias add to its gradient in turn, and so many at once. It must not depend on the number of threads,
// or the bits would.
constexpr int64_t kTablesOfSharedBias = 4;

// fp32 [B or 1, tables, n_q, n_k] of zeros: the gradient of this bias is the sum over the tables.
Tensor zero_d_bias(const Tensor& bias, const Problem& p) {
  const int64_t B = bias.dim() > 3 ? bias.size(-4) : 1, H = bias.dim() > 2 ? bias.size(-3) : 1;
  return at::zeros({B, H == 1 ? std::min(p.H, kTablesOfSharedBias) : H, p.n_q, p.n_k}, at::kFloat);
}

// Whether the elements of a row lie side by side in what empty_like makes of `x`.
bool likes_rows(const Tensor& x) {
  return x.stride(3) == 1 || x.size(3) <= 1 || !x.is_non_overlapping_and_dense();
}

// A new tensor of the sizes of `x` with the elements of a row side by side, and in the memory order of `x` where it can be.
Tensor writable_like(const Tensor& x, at::ScalarType dtype) {
  const auto options = x.options().dtype(dtype);
  return likes_rows(x) ? at::empty_like(x, options) : at::empty(x.sizes(), options);
}

// `result` of `writable_like` in the dtype and the memory order of empty_like.
Tensor in_order_of(const Tensor& x, const Tensor& result) {
  return likes_rows(x) ? result.to(x.scalar_type()) : at::empty_like(x).copy_(result);
}

// dq, dk and dv in their dtypes; and sums of dS in fp32: over what shares an entry of the bias, in tables that are to be
// added; over the queries, [B, H, n_k]; over the keys, [B, H, n_q]; and over the keys times minus their distances.
std::array<MaybeTensor, 7> backward(const MaybeTensor& d_o, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const Tensor& o, const Tensor& lse, const Spec& spec,
                                    const std::array<bool, 6>& wanted_results) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const auto [wants_dq, wants_dk_dv, wants_ds, wants_ds_of_keys, wants_ds_of_queries, wants_ds_by_distance] =
      wanted_results;
  const Call call(q, k, v, spec);
  const Problem& p = call.params();
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

// A call without values.
class WeightsCall : public Call {
 public:
  WeightsCall(const Tensor& q, const Tensor& k, const Spec& spec) : Call(q, k, k, spec), without_values_(params()) {
    without_values_.d_v = 0;
  }

  const Problem& without_values() const { return without_values_; }

 private:
  Problem without_values_;
};

// The weights in the dtype of q, [B, 1 or H, n_q, n_k]; `lse` is that of `forward`, or none.
Tensor weights(const Tensor& q, const Tensor& k, const MaybeTensor& lse, const Spec& spec, bool average_heads) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const WeightsCall call(q, k, spec);
  const Problem& p = call.without_values();
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
  const Problem& p = call.without_values();
  const Tensor result = at::empty({p.B, p.H, p.n_k}, at::kFloat);
  run_received(choose_capability(), p, result.data_ptr<float>(), at::get_num_threads(), in_turn);
  return result;
}

// The largest weights of each query, fp32 [B, H, n_q, top_k], and their keys, int64.
std::tuple<Tensor, Tensor> top_keys(const Tensor& q, const Tensor& k, const Spec& spec, int64_t top_k) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const WeightsCall call(q, k, spec);
  const Problem& p = call.without_values();
  const Tensor largest = at::empty({p.B, p.H, p.n_q, top_k}, at::kFloat), keys = at::empty_like(largest, at::kLong);
  const TopKeysOutputs out{largest.data_ptr<float>(), keys.data_ptr<int64_t>(), top_k};
  run_top_keys(choose_capability(), p, out, at::get_num_threads(), in_turn);
  return {largest, keys};
}

// bool [B, H, n_q, n_k], by the lists, ranges and gaps that the kernels walk, for blocks of `block` queries: the tests
// compare it with Mask.keep.
Tensor keep(const Tensor& q, const Tensor& k, const Spec& spec, int64_t block) {
  const Call call(q, k, k, spec);
  const Problem& p = call.params();
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
    static const Names& names = *new Names;
    const object mask = get(spec, names.mask), window = get(mask, names.window), segments = get(mask, names.segments);
    read(mask, names.causal, value.causal);
    read(mask, names.q_start, value.q_start);
    read(mask, names.real_queries, value.real_queries);
    read(mask, names.real_keys, value.real_keys);
    read(mask, names.dense, value.dense);
    std::tie(value.left, value.right) = window.cast<std::pair<std::optional<int64_t>, std::optional<int64_t>>>();
    if (!segments.is_none()) {
      std::tie(value.ids_q, value.ids_k) = segments.cast<std::pair<at::Tensor, at::Tensor>>();
    }
    read(spec, names.scale, value.scale);
    read(spec, names.softcap, value.softcap);
    read(spec, names.bias, value.bias);
    read(spec, names.alibi_slopes, value.alibi_slopes);
    read(spec, names.sinks, value.sinks);
    read(spec, names.dropout_p, value.dropout_p);
    read(spec, names.seed, value.seed);
    return true;
  }

 private:
  // Interned once, which makes a look-up of an attribute several times as fast.
  struct Names {
    PyObject *mask = of("mask"), *causal = of("causal"), *q_start = of("q_start"), *window = of("window"),
             *real_queries = of("real_queries"), *real_keys = of("real_keys"), *segments = of("segments"),
             *dense = of("dense"), *scale = of("scale"), *softcap = of("softcap"), *bias = of("bias"),
             *alibi_slopes = of("alibi_slopes"), *sinks = of("sinks"), *dropout_p = of("dropout_p"), *seed = of("seed");

    static PyObject* of(const char* name) { return PyUnicode_InternFromString(name); }
  };

  static object get(handle from, PyObject* name) {
    PyObject* const found = PyObject_GetAttr(from.ptr(), name);
    if (!found) throw error_already_set();
    return reinterpret_steal<object>(found);
  }

  template <class T>
  static void read(handle from, PyObject* name, T& to) {
    to = get(from, name).cast<T>();
  }
};

}  // namespace pybind11::detail

namespace fastattn {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("forward", &forward, without_gil);
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
