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
  for (uint64_t eight; end - gap >= int64_t(sizeof eight); end -= sizeof eight) {
    std::memcpy(&eight, end - sizeof eight, sizeof eight);
    if (eight) break;
  }
  while (!end[-1]) --end;
  return {static_cast<int32_t>(begin - row), static_cast<int32_t>(end - row), kDenseGaps};
}

// Writes a row of tiles of a bool mask whose rows have no gaps.
inline void write_tiles(const BlockRange& range, int64_t n_k, uint8_t* tiles) {
  for (int64_t first = 0; first < n_k; first += kMaskTile, ++tiles) {
    const KeyRange keys{first, std::min(first + kMaskTile, n_k)};
    const bool full = range.all.begin <= keys.begin && keys.end <= range.all.end;
    *tiles = full ? kFull : range.some.meets(keys) ? kPartial : kSkipped;
  }
}

// Finds a row of tiles from at most kMaskTile rows of a bool mask, some of which have gaps.
class RowOfTiles {
 public:
  explicit RowOfTiles(int64_t n_k) : n_k_(n_k), some_((n_k + kMaskTile - 1) / kMaskTile), all_(some_.size()) {}

  // Writes what each tile is. Returns whether none is partial: `range` is then that of each row.
  template <class Row>
  bool find(int64_t first, int64_t last, Row row, uint8_t* tiles, RowRange& range) {
    std::fill(some_.begin(), some_.end(), Entries{});
    std::fill(all_.begin(), all_.end(), kOnes);
    for (int64_t i = first; i < last; ++i) add(row(i));
    bool whole = true;
    int64_t begin = n_k_, end = 0;
    for (int64_t j = 0; j < int64_t(some_.size()); ++j) {
      const bool some = some_[j][0] | some_[j][1];
      const bool all = all_[j][0] == kOnes[0] && all_[j][1] == kOnes[1];
      tiles[j] = all ? kFull : some ? kPartial : kSkipped;
      whole &= all == some;
      if (all) begin = std::min(begin, j * kMaskTile), end = std::min((j + 1) * kMaskTile, n_k_);
    }
    range = {int32_t(begin), int32_t(end), kDenseGaps};
    return whole;
  }

 private:
  typedef uint64_t Entries __attribute__((vector_size(kMaskTile)));
  static constexpr Entries kOnes = {0x0101010101010101, 0x0101010101010101};

  void add(const char* row) {
    const int64_t whole = n_k_ / kMaskTile, rest = n_k_ % kMaskTile;
    Entries entries;
    for (int64_t j = 0; j < whole; ++j) {
      std::memcpy(&entries, row + j * kMaskTile, kMaskTile);
      some_[j] |= entries, all_[j] &= entries;
    }
    if (rest == 0) return;
    std::memset(&entries, row[n_k_ - 1], kMaskTile);  // changes neither: it is one of them
    std::memcpy(&entries, row + whole * kMaskTile, rest);
    some_[whole] |= entries, all_[whole] &= entries;
  }

  int64_t n_k_;
  std::vector<Entries> some_, all_;
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
