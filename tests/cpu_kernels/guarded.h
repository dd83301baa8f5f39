// Memory that shows every access beside it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace fastattn::test {

// Where a buffer lies: its last byte right before a page that nobody may touch, its first byte right after one, or on
// the heap, uninitialised, for the tools that watch the heap (valgrind, AddressSanitizer).
enum class Placement { before_guard, after_guard, heap };

constexpr Placement kPlacements[] = {Placement::before_guard, Placement::after_guard, Placement::heap};

inline const char* name_of(Placement placement) {
  return placement == Placement::before_guard  ? "before_guard"
         : placement == Placement::after_guard ? "after_guard"
                                               : "heap";
}

class Buffer {
 public:
  // What stands in guarded memory that nobody has written: NaN in every dtype.
  static constexpr unsigned char kUntouched = 0xff;

  // bytes: a multiple of the alignment.
  Buffer(Placement placement, int64_t bytes, int64_t alignment) : placement_(placement), bytes_(bytes) {
    if (bytes % alignment != 0) throw std::logic_error("the size of a buffer must be a multiple of its alignment");
    if (placement == Placement::heap) {
      void* allocated = nullptr;
      if (posix_memalign(&allocated, std::max<size_t>(alignment, sizeof(void*)), bytes) != 0) throw std::bad_alloc();
      data_ = static_cast<char*>(allocated);
      return;
    }
    const int64_t page = sysconf(_SC_PAGESIZE);
    between_ = (bytes + page - 1) / page * page;
    void* mapped = mmap(nullptr, between_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<char*>(mapped);
    begin_ = mapped_ + page;
    if (between_ > 0 && mprotect(begin_, between_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(begin_, kUntouched, between_);
    data_ = placement == Placement::after_guard ? begin_ : begin_ + between_ - bytes;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (placement_ == Placement::heap) {
      std::free(data_);
    } else {
      munmap(mapped_, between_ + 2 * (begin_ - mapped_));
    }
  }

  template <class T = char>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size() const { return bytes_; }

  // Nobody has written bytes first, ..., last - 1; on the heap nobody can tell.
  bool untouched(int64_t first, int64_t last) const {
    return placement_ == Placement::heap || is_untouched(data_ + first, data_ + last);
  }

  // The same of the rest of its pages.
  bool surroundings_untouched() const {
    return placement_ == Placement::heap ||
           (is_untouched(begin_, data_) && is_untouched(data_ + bytes_, begin_ + between_));
  }

 private:
  static bool is_untouched(const char* first, const char* last) {
    return std::all_of(first, last, [](char byte) { return static_cast<unsigned char>(byte) == kUntouched; });
  }

  Placement placement_;
  int64_t bytes_, between_ = 0;
  char *data_ = nullptr, *mapped_ = nullptr, *begin_ = nullptr;
};

}  // namespace fastattn::test
