// The rows of a sequence that are visited: padding costs nothing because it is not on the list.
#pragma once

#include <cstdint>
#include <vector>

namespace fastattn {

// Increasing row numbers. A run of consecutive ones (no padding, or padding at the ends) needs no table.
struct IndexList {
  const int32_t* table;  // null: first, first + 1, ...
  int64_t first;
  int64_t count;

  int64_t at(int64_t i) const { return table ? table[i] : first + i; }

  bool consecutive(int64_t i, int64_t n) const { return !table || table[i + n - 1] - table[i] == n - 1; }

  // The place of the first listed row that is >= row.
  int64_t lower_bound(int64_t row) const {
    if (!table) return row <= first ? 0 : row - first < count ? row - first : count;
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (table[middle] < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  bool contains(int64_t row) const {
    const int64_t i = lower_bound(row);
    return i < count && at(i) == row;
  }
};

// The list of the rows i for which is_real(i); `table` keeps what the list points to.
template <class IsReal>
IndexList index_list(int64_t n, std::vector<int32_t>& table, IsReal is_real) {
  table.resize(n);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    table[count] = static_cast<int32_t>(i);
    count += is_real(i);
  }
  table.resize(count);
  const IndexList list{table.data(), count ? table[0] : 0, count};
  const bool one_run = count == 0 || list.consecutive(0, count);
  return {one_run ? nullptr : list.table, list.first, count};
}

}  // namespace fastattn
