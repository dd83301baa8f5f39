// A Mask of fastattn/spec.py as the tables that the kernels read: lists of real rows, ranges of keys, documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "index_list.h"
#include "params.h"
#include "ranges.h"
#include "threads.h"

namespace fastattn {
namespace {

// Mask of fastattn/spec.py for B samples of n_q queries and n_k keys: what is null it does not have.
struct MaskParams {
  bool causal = false;
  std::optional<int64_t> left, right;  // of the window
  int64_t q_offset = 0;
  const int64_t* q_offsets = nullptr;                        // [B], or [B, n_q], in the place of q_offset
  bool per_query_offset = false;                             // whether it is [B, n_q]
  const bool *real_queries = nullptr, *real_keys = nullptr;  // [B, n_q] and [B, n_k]
  const int64_t *ids_q = nullptr, *ids_k = nullptr;          // of the documents, [B, n_q] and [B, n_k]
  Table dense{};                                             // bool
};

// The rows of every batch entry that are not padding: marked as real, and of a document.
class RealRows {
 public:
  RealRows(const bool* mark, const int64_t* id, int64_t B, int64_t n)
      : tables_(B), lists_(B, IndexList{nullptr, 0, n}) {
    if (!mark && !id) return;
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

// Mask of fastattn/spec.py, in the form that the kernels take.
class Mask {
 public:
  Mask(int64_t B, int64_t H, int64_t n_q, int64_t n_k, const MaskParams& mask)
      : B(B),
        H(H),
        n_q(n_q),
        n_k(n_k),
        band_(make_band(mask.causal, mask.left.value_or(kNoLimit), mask.right.value_or(kNoLimit))),
        per_query_offset_(mask.q_offsets && mask.per_query_offset),
        queries_(mask.real_queries, mask.ids_q, B, n_q),
        keys_(mask.real_keys, mask.ids_k, B, n_k),
        dense_(mask.dense) {
    if (mask.q_offsets) {
      q_offset_.assign(mask.q_offsets, mask.q_offsets + (per_query_offset_ ? B * n_q : B));
    } else {
      q_offset_.assign(B, mask.q_offset);
    }
    if (mask.ids_k) {
      set_documents(mask.ids_q, mask.ids_k);
    } else if (dense_.data || per_query_offset_) {
      set_ranges([&](int64_t b, int64_t i) {
        const KeyRange keys = visible_keys(band_, position_of(i, q_offset_of(b, i)), this->n_k);
        return RowRange{int32_t(keys.begin), int32_t(keys.end), kNoGaps};
      });
    }
    if (dense_.data) set_dense();
    set_groups();
    if (mask.ids_k && range_heads_ == 1) set_isolated_runs();
  }

  void describe(Params& p) const {
    p.band = band_;
    p.q_offset = q_offset_.data();
    p.per_query_offset = per_query_offset_;
    p.queries = queries_.lists();
    p.keys = keys_.lists();
    p.dense = dense_;
    p.mask_tiles = mask_tiles_;
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
  int64_t q_offset_of(int64_t b, int64_t query) const { return q_offset_[per_query_offset_ ? b * n_q + query : b]; }

  void set_documents(const int64_t* ids_q, const int64_t* ids_k) {
    const bool shared = ids_q == ids_k && n_q == n_k;
    const auto number = [&](DocumentsOfSample& sample, const int64_t* ids, int64_t b, int64_t n,
                            std::vector<int32_t>& document, std::vector<int32_t>& rank) {
      document.resize(B * n), rank.resize(B * n);
      sample.number(ids + b * n, n, document.data() + b * n, rank.data() + b * n);
    };
    std::vector<DocumentsOfSample> samples(B);
    for (int64_t b = 0; b < B; ++b) {
      number(samples[b], ids_k, b, n_k, document_of_key_, rank_of_key_);
      if (!shared) number(samples[b], ids_q, b, n_q, document_of_query_, rank_of_query_);
      samples[b].collect(document_of_key_.data() + b * n_k, rank_of_key_.data() + b * n_k, n_k);
    }
    if (shared) document_of_query_ = document_of_key_, rank_of_query_ = rank_of_key_;
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

  // Narrows the ranges to what a dense mask leaves visible. Rows that serve several samples, heads or queries are
  // looked at once.
  void set_dense() {
    const Table& table = dense_;
    const int64_t samples = table.batch_stride ? B : 1, rows = table.query_stride ? n_q : 1;
    range_heads_ = table.head_stride ? H : 1;
    const int64_t per_head = (rows + kMaskTile - 1) / kMaskTile, per_row = (n_k + kMaskTile - 1) / kMaskTile;
    std::vector<RowRange> visible(samples * range_heads_ * rows);
    tiles_.resize(samples * range_heads_ * per_head * per_row);
    parallel_for(samples * range_heads_ * per_head, 4, [&](int64_t begin, int64_t end) {
      RowOfTiles tiles(n_k);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / per_head, first = i % per_head * kMaskTile, last = std::min(first + kMaskTile, rows);
        const auto row = [&](int64_t query) { return table.row(head / range_heads_, head % range_heads_, query); };
        RowRange* const ranges = &visible[head * rows];
        BlockRange joint = no_queries(n_k);
        bool gaps = false;
        const auto find_range = [&](int64_t query) {
          ranges[query] = dense_range(row(query), table.one_for_all_keys, n_k);
          joint.add(KeyRange{ranges[query].begin, ranges[query].end});
          gaps |= ranges[query].gaps != kNoGaps;
        };
        for (int64_t query = first; query < last && !gaps; ++query) find_range(query);
        RowRange of_all;
        if (!gaps) {
          write_tiles(joint, n_k, &tiles_[i * per_row]);
        } else if (tiles.find(first, last, row, &tiles_[i * per_row], of_all)) {
          std::fill(ranges + first, ranges + last, of_all);
        } else {
          for (int64_t query = first; query < last; ++query) find_range(query);
        }
      }
    });
    const std::vector<RowRange> of_samples = std::move(ranges_);
    ranges_.resize(B * range_heads_ * n_q);
    RowRange* to = ranges_.data();
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < range_heads_; ++h) {
        const RowRange* const of_head = &visible[((samples == 1 ? 0 : b) * range_heads_ + h) * rows];
        for (int64_t query = 0; query < n_q; ++query, ++to) {
          *to = both(of_samples[b * n_q + query], of_head[rows == 1 ? 0 : query]);
          gaps_ |= to->gaps;
        }
      }
    }
    if (gaps_ & kDenseGaps) {
      mask_tiles_ = {tiles_.data(), samples == 1 ? 0 : range_heads_ * per_head * per_row,
                     range_heads_ == 1 ? 0 : per_head * per_row, rows == 1 ? 0 : per_row,
                     4 * std::count(tiles_.begin(), tiles_.end(), kSkipped) > int64_t(tiles_.size())};
    }
  }

  Band band_;
  std::vector<int64_t> q_offset_;  // [B], or [B, n_q]
  bool per_query_offset_;
  RealRows queries_, keys_;
  Table dense_;
  std::vector<RowRange> ranges_;  // [B, range_heads_, n_q]
  std::vector<KeyRange> groups_;  // [B, range_heads_, groups_of_head()]
  int64_t range_heads_ = 1;
  std::vector<uint8_t> tiles_;
  MaskTiles mask_tiles_{};
  std::vector<std::vector<IsolatedRun>> isolated_runs_;  // [B]
  std::vector<IsolatedRunList> isolated_run_lists_;
  uint32_t gaps_ = kNoGaps;
  std::vector<int32_t> document_of_query_, document_of_key_, rank_of_query_, rank_of_key_;
};

}  // namespace
}  // namespace fastattn
