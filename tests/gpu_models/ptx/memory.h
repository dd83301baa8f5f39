// Memory that knows who wrote and read each byte, and finds what no order was made for.
//
// Vector clocks (Flanagan, Freund: FastTrack, 2009): each warp counts its releases, and knows how far it has seen each
// other agent. An access is an epoch, the agent and its count. Two of one byte, one of them a write, are a race unless
// the later agent has seen the epoch of the former.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

struct Fault {
  std::string what;
};
[[noreturn]] inline void fault(std::string what) { throw Fault{std::move(what)}; }

inline std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

// The warps come first; then what a warp has begun that reads or writes memory on its own: matrix products and bulk
// copies out of shared memory. kPending stands for bytes that nobody may touch yet; from kLoaders on, one for each
// mbarrier, come those that write what TMA loads.
constexpr int kAgents = 96, kProducts = 32, kBulk = 48, kPending = 63, kLoaders = 64, kClockBits = 25;
using Clock = std::array<uint32_t, kAgents>;
using Epoch = uint32_t;

inline Epoch epoch(int agent, uint32_t clock) {
  if (clock >> kClockBits) fault("this launch is too long for its clocks");
  return Epoch(agent) << kClockBits | clock;
}
constexpr Epoch kUnderWay = Epoch(kPending) << kClockBits | ((1u << kClockBits) - 1);
inline int agent_of(Epoch e) { return int(e >> kClockBits); }
inline uint32_t clock_of(Epoch e) { return e & ((1u << kClockBits) - 1); }
inline void join(Clock& to, const Clock& from) {
  for (int i = 0; i < kAgents; i++) to[i] = std::max(to[i], from[i]);
}
// Whether all that happened before the one happened before the other.
inline bool includes(const Clock& x, const Clock& other) {
  bool result = true;
  for (int i = 0; i < kAgents; i++) result &= x[i] >= other[i];
  return result;
}

inline std::string name_of(int agent) {
  if (agent < kProducts) return "warp " + std::to_string(agent);
  if (agent < kBulk) return "a matrix product of warp " + std::to_string(agent - kProducts);
  if (agent < kPending) return "a bulk copy of warp " + std::to_string(agent - kBulk);
  return agent == kPending ? "an asynchronous copy that nobody waited for" : "a load by TMA";
}

class Shared {
 public:
  explicit Shared(size_t bytes) : data_(bytes), wrote_(bytes) {}

  uint8_t* data(uint64_t at) { return data_.data() + at; }
  size_t size() const { return data_.size(); }
  uint32_t start() const { return start_; }  // what happened up to it, happened in other blocks

  void begin_block() { start_ = last_ + 1; }
  void happened(const Clock& clock) {
    for (uint32_t x : clock) last_ = std::max(last_, x);
  }

  void check_bounds(uint64_t at, uint64_t bytes, uint64_t alignment) const {
    if (at % alignment) fault("shared address " + hex(at) + " is no multiple of " + std::to_string(alignment));
    if (at + bytes > data_.size() || at + bytes < at) {
      fault("shared address " + hex(at) + " is outside of the " + std::to_string(data_.size()) + " bytes");
    }
  }

  // Who has seen `seen` reads `bytes` at `at`.
  void reads(const Clock& seen, uint64_t at, uint64_t bytes, Epoch as) {
    may_read(seen, at, bytes);
    std::vector<uint32_t>& read = read_[agent_of(as)];
    if (read.empty()) read.resize(data_.size());
    std::fill_n(read.begin() + at, bytes, clock_of(as));
  }
  void may_read(const Clock& seen, uint64_t at, uint64_t bytes) const {
    Epoch known = ~0u;  // which is none
    for (uint64_t i = at; i < at + bytes; i++) {
      const Epoch e = wrote_[i];
      if (e == known) continue;
      if (clock_of(e) <= start_) fault("shared byte " + hex(i) + " is read before it is written");
      if (clock_of(e) > seen[agent_of(e)]) race(i, "reads", "wrote", agent_of(e));
      known = e;
    }
  }
  // `of_reads`: what of the reads was seen, where that differs.
  // Warps may write the same `data` twice without an order, as Triton's do that hold the same part of a tensor.
  void writes(const Clock& seen, uint64_t at, uint64_t bytes, Epoch as, const uint8_t* data = nullptr,
              const Clock* of_reads = nullptr) {
    for (uint64_t i = at; i < at + bytes; i++) {
      const Epoch e = wrote_[i];
      const bool same = data && e != kUnderWay && clock_of(e) > start_ && data_[i] == data[i - at];
      if (clock_of(e) > seen[agent_of(e)] && !same) race(i, "writes", "wrote", agent_of(e));
    }
    for (int other = 0; other < kAgents; other++) {
      if (read_[other].empty()) continue;
      const uint32_t* read = read_[other].data();
      if (*std::max_element(read + at, read + at + bytes) > (of_reads ? *of_reads : seen)[other])
        race(at, "writes", "reads", other);
    }
    std::fill_n(wrote_.begin() + at, bytes, as);
  }
  // What was begun there lands: see kPending.
  void lands(uint64_t at, uint64_t bytes, const uint8_t* data, Epoch as) {
    std::memcpy(data_.data() + at, data, bytes);
    std::fill_n(wrote_.begin() + at, bytes, as);
  }

 private:
  [[noreturn]] static void race(uint64_t at, const char* does, const char* did, int other) {
    fault(std::string("race: ") + does + " shared byte " + hex(at) + ", which " + name_of(other) + " " + did);
  }

  std::vector<uint8_t> data_;
  std::vector<Epoch> wrote_;
  std::array<std::vector<uint32_t>, kAgents> read_;
  uint32_t start_ = 0, last_ = 0;
};

// Global memory: the bytes of the tensors that a launch was given. Of the warps of other blocks nobody has seen
// anything.
class Global {
 public:
  struct Range {
    uint64_t begin, end;
  };
  explicit Global(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& x, const Range& y) { return x.begin < y.begin; });
    ranges_.push_back({0, 0});
    for (const Range& x : ranges) {
      if (x.begin > ranges_.back().end)
        ranges_.push_back(x);
      else
        ranges_.back().end = std::max(ranges_.back().end, x.end);
    }
  }

  void check_bounds(uint64_t at, uint64_t bytes, uint64_t alignment) {
    if (at % alignment) fault("global address " + hex(at) + " is no multiple of " + std::to_string(alignment));
    if (inside(ranges_[last_], at, bytes)) return;
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), at,
                                        [](uint64_t x, const Range& range) { return x < range.begin; });
    const Range& x = *(after - 1);
    last_ = size_t(&x - ranges_.data());
    if (inside(x, at, bytes)) return;
    fault(std::to_string(bytes) + " bytes at global address " + hex(at) + " are outside of every tensor, " +
          std::to_string(at - x.begin) + " bytes from where elements begin of which " +
          std::to_string(x.end - x.begin) + " bytes lie side by side");
  }

  void reads(uint32_t block, Epoch as, const Clock& seen, uint64_t at, int bytes) {
    for (uint64_t i = at; i < at + uint64_t(bytes); i++) {
      Bytes& page = page_of(i);
      const uint64_t wrote = page.wrote[i % kPage], read = page.read[i % kPage];
      if (wrote) check(wrote, block, seen, i, "reads", "wrote");
      page.read[i % kPage] = read && read >> 32 != block ? kMany : uint64_t(block) << 32 | as;
    }
  }
  // atomically: with others that do, in any order.
  void writes(uint32_t block, Epoch as, const Clock& seen, uint64_t at, int bytes, bool atomically = false) {
    for (uint64_t i = at; i < at + uint64_t(bytes); i++) {
      Bytes& page = page_of(i);
      uint64_t &wrote = page.wrote[i % kPage], &read = page.read[i % kPage];
      if (wrote && !(atomically && wrote == kAtomic)) check(wrote, block, seen, i, "writes", "wrote");
      if (read) check(read, block, seen, i, "writes", "reads");
      wrote = atomically ? kAtomic : uint64_t(block) << 32 | as;
    }
  }

 private:
  static constexpr uint64_t kPage = 4096, kMany = ~0ull, kAtomic = ~1ull;
  struct Bytes {
    std::array<uint64_t, kPage> wrote{}, read{};  // block + 1 and epoch
  };

  static bool inside(const Range& x, uint64_t at, uint64_t bytes) { return at >= x.begin && at + bytes <= x.end; }
  Bytes& page_of(uint64_t at) {
    if (at / kPage != page_ || bytes_ == nullptr) {
      std::unique_ptr<Bytes>& found = pages_[page_ = at / kPage];
      if (!found) found = std::make_unique<Bytes>();
      bytes_ = found.get();
    }
    return *bytes_;
  }
  static void check(uint64_t before, uint32_t block, const Clock& seen, uint64_t at, const char* does,
                    const char* did) {
    const Epoch e = Epoch(before);
    const bool here = before >> 32 == block;
    if (here && clock_of(e) <= seen[agent_of(e)]) return;
    fault(std::string("race: ") + does + " global byte " + hex(at) + ", which " +
          (here ? name_of(agent_of(e)) : "another block") + " " + did);
  }

  std::vector<Range> ranges_;
  size_t last_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Bytes>> pages_;
  uint64_t page_ = 0;
  Bytes* bytes_ = nullptr;
};

}  // namespace ptx
