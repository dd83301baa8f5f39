// Prefetches what a thread's next item reads into the L2 cache while this one computes: a few cache lines before each
// product, so that loads and products overlap. Items of short sequences would wait for memory a tenth of their time.
#pragma once

#include <cstdint>

#include "params.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

class Prefetch {
 public:
  // Adds the rows first, ..., last - 1 of a list, unless they are on pages or there is no more room in the cache.
  template <class Byte>
  void add(const RowsOf<Byte>& x, int64_t b, int64_t h, const IndexList& rows, int64_t first, int64_t last, int64_t d) {
    if (!x.data || x.table || first >= last || d == 0) return;
    const int64_t begin = rows.at(first), n = rows.at(last - 1) + 1 - begin, bytes = bytes_of(x.dtype);
    const Rows result{x.row(b, h, begin), x.row_stride * bytes, (d * bytes + kLine - 1) / kLine, n};
    if (count_ == kMost || lines_ + result.lines * result.n > kLines) return;
    rows_[count_++] = result;
    lines_ += result.lines * result.n;
  }

  // Spreads all rows over that many steps.
  void spread(int64_t steps) { lines_of_step_ = lines_ / greater(steps, 1) + 1; }

  FASTATTN_INLINE void step() {
    constexpr int kIntoL2 = 2;
    for (int64_t lines = lines_of_step_; lines > 0 && next_ < count_;) {
      const Rows rows = rows_[next_];
      const char* row = rows.at;
      int64_t n = rows.n;
      for (; lines > 0 && n > 0; lines -= rows.lines, row += rows.stride, --n) {
        const char* const end = row + rows.lines * kLine;
        for (const char* line = row; line < end; line += kLine) __builtin_prefetch(line, 0, kIntoL2);
      }
      rows_[next_].at = row, rows_[next_].n = n;
      next_ += n == 0;
    }
  }

 private:
  static constexpr int64_t kLine = 64, kLines = (512 << 10) / kLine, kMost = 8;

  struct Rows {
    const char* at;
    int64_t stride, lines;  // in bytes, and of one row
    int64_t n;
  };
  Rows rows_[kMost];
  int64_t count_ = 0, next_ = 0, lines_ = 0, lines_of_step_ = 0;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
