// The keys between the first and the last one that a query may see, where position alone does not tell: by documents
// and by any bool mask. Found once per call, so that what a mask hides at the ends of a row is never visited. Most
// masks hide nothing in between, and are then not read again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "params.h"

namespace fastattn {

// The documents of one batch entry, from ids in any order.
class DocumentsOfSample {
 public:
  // Writes number and rank of the tokens.
  void number(const int64_t* ids, int64_t n, int32_t* document, int32_t* rank) {
    std::vector<int32_t> count(numbers_.size());
    for (int64_t i = 0; i < n; ++i) {
      if (i > 0 && ids[i] == ids[i - 1]) {
        document[i] = document[i - 1];
      } else {
        const auto next = static_cast<int32_t>(numbers_.size());
        document[i] = ids[i] < 0 ? -1 : numbers_.try_emplace(ids[i], next).first->second;
        count.resize(numbers_.size());
      }
      rank[i] = document[i] < 0 ? 0 : count[document[i]]++;
    }
  }

  // Sorts the keys by document.
  void collect(const int32_t* document, const int32_t* rank, int64_t n_k) {
    first_.assign(numbers_.size() + 1, 0);
    for (int64_t key = 0; key < n_k; ++key) {
      if (document[key] >= 0) ++first_[document[key] + 1];
    }
    for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    keys_.resize(first_.back());
    for (int64_t key = 0; key < n_k; ++key) {
      if (document[key] >= 0) keys_[first_[document[key]] + rank[key]] = static_cast<int32_t>(key);
    }
  }

  RowRange visible(Band band, int32_t document, int64_t position) const {
    if (document < 0) return {0, 0, kNoGaps};
    const KeyRange ranks = visible_keys(band, position, first_[document + 1] - first_[document]);
    if (ranks.empty()) return {0, 0, kNoGaps};
    const int32_t* const keys = &keys_[first_[document]];
    const int32_t begin = keys[ranks.begin], end = keys[ranks.end - 1] + 1;
    return {begin, end, end - begin == ranks.end - ranks.begin ? kNoGaps : kOtherDocuments};
  }

 private:
  std::unordered_map<int64_t, int32_t> numbers_;
  std::vector<int32_t> keys_, first_;  // sorted by document, and where each document begins
};

// The first byte that is not 0, or `stop`.
inline const char* find_visible(const char* at, const char* stop) {
  for (uint64_t eight; stop - at >= int64_t(sizeof eight); at += sizeof eight) {
    std::memcpy(&eight, at, sizeof eight);
    if (eight) break;
  }
  return std::find_if(at, stop, [](char visible) { return visible != 0; });
}

// The visible keys of a row of a bool mask.
inline RowRange dense_range(const char* row, bool one_for_all_keys, int64_t n_k) {
  const auto end_of_row = static_cast<int32_t>(n_k);
  if (one_for_all_keys) return {0, row[0] ? end_of_row : 0, kNoGaps};
  const char* const stop = row + n_k;
  const char* const begin = find_visible(row, stop);
  const void* const hidden = std::memchr(begin, 0, stop - begin);
  const char* const gap = hidden ? static_cast<const char*>(hidden) : stop;
  if (find_visible(gap, stop) == stop) {
    return {static_cast<int32_t>(begin - row), static_cast<int32_t>(gap - row), kNoGaps};
  }
  const char* end = stop;
  while (!end[-1]) --end;
  return {static_cast<int32_t>(begin - row), static_cast<int32_t>(end - row), kDenseGaps};
}

// The tiles of a few rows of a bool mask: rows are joined by eight keys at a time.
class RowOfTiles {
 public:
  explicit RowOfTiles(int64_t n_k)
      : n_k_(n_k), some_((n_k + kMaskTile - 1) / kMaskTile * 2), all_(some_.size(), kOnes) {}

  void add(const char* row) {
    const int64_t whole = n_k_ / 8;
    for (int64_t i = 0; i < whole; ++i) {
      uint64_t eight;
      std::memcpy(&eight, row + 8 * i, 8);
      some_[i] |= eight, all_[i] &= eight;
    }
    for (int64_t key = 8 * whole; key < n_k_; ++key) {
      row[key] ? some_[whole] |= 1 : all_[whole] = 0;
    }
  }

  void write(uint8_t* tiles) const {
    for (size_t i = 0; i < some_.size(); i += 2) {
      const bool some = some_[i] | some_[i + 1], all = (all_[i] & all_[i + 1]) == kOnes;
      tiles[i / 2] = all ? kFull : some ? kPartial : kSkipped;
    }
  }

 private:
  static constexpr uint64_t kOnes = 0x0101010101010101;
  int64_t n_k_;
  std::vector<uint64_t> some_, all_;
};

// Cuts a list of queries wherever all before see only keys that lie before any key that those after see.
inline std::vector<IsolatedRun> isolated_runs_of(const RowRange* ranges, const IndexList& queries) {
  const auto range = [&](int64_t place) { return ranges[queries.at(place)]; };
  std::vector<int32_t> first_key_from(queries.count + 1, std::numeric_limits<int32_t>::max());
  for (int64_t i = queries.count - 1; i >= 0; --i) {
    const bool sees = range(i).begin < range(i).end;
    first_key_from[i] = sees ? std::min(range(i).begin, first_key_from[i + 1]) : first_key_from[i + 1];
  }
  std::vector<IsolatedRun> isolated_runs;
  for (int64_t first = 0, last; first < queries.count; first = last) {
    IsolatedRun isolated_run{first, first, {0, 0}, true};
    const RowRange of_first = range(first);
    for (last = first; last == first || (last < queries.count && isolated_run.keys.end > first_key_from[last]);
         ++last) {
      const RowRange keys = range(last);
      isolated_run.keys = hull(isolated_run.keys, {keys.begin, keys.end});
      isolated_run.see_all &= keys.gaps == kNoGaps && keys.begin == of_first.begin && keys.end == of_first.end;
    }
    isolated_run.last = last;
    isolated_runs.push_back(isolated_run);
  }
  return isolated_runs;
}

inline RowRange both(RowRange x, RowRange y) {
  const int32_t begin = std::max(x.begin, y.begin);
  return {begin, std::max(begin, std::min(x.end, y.end)), x.gaps | y.gaps};
}

}  // namespace fastattn
