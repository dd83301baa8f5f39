// A Mask of fastattn/spec.py as the tables that the kernels read: lists of real rows, ranges of keys, documents.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "index_list.h"
#include "params.h"
#include "ranges.h"

namespace fastattn {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

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
    check_table(documents, B, n, "segment_ids");
    const Tensor contiguous = marks ? marks->contiguous() : Tensor();
    const bool* mark = marks ? contiguous.const_data_ptr<bool>() : nullptr;
    const int64_t* id = documents ? documents->const_data_ptr<int64_t>() : nullptr;
    for (int64_t b = 0; b < B; ++b) {
      lists_[b] = index_list(n, tables_[b],
                             [&](int64_t i) { return (!mark || mark[b * n + i]) && (!id || id[b * n + i] >= 0); });
    }
  }

  const IndexList* lists() const { return lists_.data(); }

 private:
  std::vector<std::vector<int32_t>> tables_;
  std::vector<IndexList> lists_;
};

// `x` with the elements of a row side by side, copied if they are not.
bool has_rows(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) <= 1; }
Tensor with_rows(const Tensor& x) { return has_rows(x) ? x : x.contiguous(); }
MaybeTensor with_rows(const MaybeTensor& x) { return x ? MaybeTensor(with_rows(*x)) : x; }

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
       std::optional<int64_t> right, int64_t q_offset, const MaybeTensor& q_offsets, const MaybeTensor& real_queries,
       const MaybeTensor& real_keys, const MaybeTensor& ids_q, const MaybeTensor& ids_k, const MaybeTensor& dense)
      : B(B),
        H(H),
        n_q(n_q),
        n_k(n_k),
        band_(make_band(causal, left.value_or(kNoLimit), right.value_or(kNoLimit))),
        documents_(ids_q, ids_k),
        queries_(real_queries, documents_.queries, B, n_q),
        keys_(real_keys, documents_.keys, B, n_k) {
    set_q_offset(q_offset, q_offsets);
    if (documents_.keys) {
      set_documents();
    } else if (dense || per_query_offset_) {
      set_ranges([&](int64_t b, int64_t i) {
        const KeyRange keys = visible_keys(band_, position_of(i, q_offset_of(b, i)), this->n_k);
        return RowRange{int32_t(keys.begin), int32_t(keys.end), kNoGaps};
      });
    }
    if (dense) set_dense(*dense);
    set_groups();
    if (documents_.keys && range_heads_ == 1) set_isolated_runs();
  }

  void describe(Params& p) const {
    p.band = band_;
    p.q_offset = q_offset_.data();
    p.per_query_offset = per_query_offset_;
    p.queries = queries_.lists();
    p.keys = keys_.lists();
    if (dense_) p.dense = table_of(*dense_);
    if (!ranges_.empty()) {
      const int64_t groups = groups_of_head(), several = range_heads_ == 1 ? 0 : 1;
      p.ranges = {ranges_.data(),   groups_.data(), range_heads_ * n_q, several * n_q, range_heads_ * groups,
                  several * groups, gaps_};
    }
    if (!isolated_run_lists_.empty()) p.isolated_runs = isolated_run_lists_.data();
    if (!document_of_query_.empty()) {
      p.documents = {document_of_query_.data(), document_of_key_.data(), rank_of_query_.data(), rank_of_key_.data()};
    }
  }

  const int64_t B, H, n_q, n_k;

 private:
  void set_q_offset(int64_t q_offset, const MaybeTensor& q_offsets) {
    if (!q_offsets) return q_offset_.assign(B, q_offset);
    check_on_cpu(*q_offsets, "q_offset");
    const Tensor offsets = q_offsets->to(at::kLong).contiguous();
    per_query_offset_ = offsets.dim() == 2;
    TORCH_CHECK_VALUE(per_query_offset_ ? offsets.sizes() == at::IntArrayRef({B, n_q})
                                        : offsets.sizes() == at::IntArrayRef({B}),
                      "q_offset must be [", B, "] or [", B, ", ", n_q, "], got ", offsets.sizes());
    const int64_t* data = offsets.const_data_ptr<int64_t>();
    q_offset_.assign(data, data + offsets.numel());
  }

  int64_t q_offset_of(int64_t b, int64_t query) const { return q_offset_[per_query_offset_ ? b * n_q + query : b]; }

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
      const int64_t position = position_of(rank_of_query_[b * n_q + i], q_offset_of(b, i));
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

  void set_isolated_runs() {
    for (int64_t b = 0; b < B; ++b) {
      isolated_runs_.push_back(isolated_runs_of(&ranges_[b * n_q], queries_.lists()[b]));
      isolated_run_lists_.push_back({isolated_runs_.back().data(), int64_t(isolated_runs_.back().size())});
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
  std::vector<int64_t> q_offset_;  // [B], or [B, n_q]
  bool per_query_offset_ = false;
  Documents documents_;
  RealRows queries_, keys_;
  MaybeTensor dense_;
  std::vector<RowRange> ranges_;  // [B, range_heads_, n_q]
  std::vector<KeyRange> groups_;  // [B, range_heads_, groups_of_head()]
  int64_t range_heads_ = 1;
  std::vector<std::vector<IsolatedRun>> isolated_runs_;  // [B]
  std::vector<IsolatedRunList> isolated_run_lists_;
  uint32_t gaps_ = kNoGaps;
  std::vector<int32_t> document_of_query_, document_of_key_, rank_of_query_, rank_of_key_;
};

}  // namespace
}  // namespace fastattn
