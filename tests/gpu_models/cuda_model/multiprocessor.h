// A multiprocessor of the GPU: runs blocks, one after the other, each thread of a block as a fiber.
//
// A warp runs in steps. In a step each of its lanes runs, one after the other, to the next instruction that the lanes
// of a warp do together, or to its end. All must come to the same one, which is then done for all of them at once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "../../cpu_kernels/guarded.h"
#include "fiber.h"
#include "settings.h"
#include "shared.h"

namespace fastattn::cuda::model {

constexpr int kLanes = 32, kMostThreads = Stacks::kCount;  // of a warp, of a block

using Place = std::source_location;

class Multiprocessor;

// What lanes do together. `run` gets the operands of each lane; a barrier gets those of the whole block.
struct Instruction {
  const char* name;
  void (*run)(Multiprocessor&, void* const* operands, int lanes);
  bool is_barrier = false;
};

// 16 bytes on their way to shared memory.
struct Copy {
  char* shared;
  const void* global;  // null: zeros
  int64_t group;

  void arrive() const {
    if (global) {
      std::memcpy(shared, global, kRowBytes);
    } else {
      std::memset(shared, 0, kRowBytes);
    }
  }
};

struct Thread {
  Fiber fiber;
  int number;
  const Instruction* at;  // what it waits for; null: it has ended
  Place place;
  void* operands;
  std::vector<Copy> copies;  // that have not arrived
  int64_t group;             // that its next copy belongs to
  size_t copies_of_step;
};

struct Grid {
  int64_t blocks;
  int threads;
  int shared_bytes;
  std::function<void()> kernel;
};

// Numbers from 0 to n - 1.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  int below(int n) {  // splitmix64
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return int((x >> 33) % n);
  }

 private:
  uint64_t state_;
};

// What stands in ascending order, in another one.
template <class Iterator>
void in_order(Iterator first, Iterator last, Order order, Random& random) {
  if (order == Order::descending) std::reverse(first, last);
  if (order != Order::random) return;
  for (auto n = last - first; n > 1; --n) std::swap(first[n - 1], first[random.below(int(n))]);
}

class Multiprocessor {
 public:
  explicit Multiprocessor(const Grid& grid)
      : grid_(grid), shared_(grid.shared_bytes), threads_(grid.threads), warps_(grid.threads / kLanes) {}

  void run_block(int64_t block) {
    current_ = this;
    block_ = block;
    random_ = Random(settings.seed * 0x10001 + block);
    shared_.forget();
    for (int i = 0; i < grid_.threads; ++i) start(i);
    for (Warp& warp : warps_) warp.state = Warp::runs;
    while (run_to_barrier()) {
    }
    if (!shared_.kept_inside()) throw Mistake(where() + " wrote beside its shared memory");
  }

  static Multiprocessor& current() { return *current_; }

  // For the thread that runs.

  void meet(const Instruction& instruction, void* operands, const Place& place) {
    Thread& thread = *running_;
    thread.at = &instruction, thread.operands = operands, thread.place = place;
    leave();
  }

  int thread() const { return running_->number; }
  int lane() const { return running_->number % kLanes; }
  int64_t block() const { return block_; }
  const Grid& grid() const { return grid_; }
  const Shared& shared() const { return shared_; }

  void copy(char* shared, const void* global_or_null) {
    Thread& thread = *running_;
    std::vector<Rows>& copies = warps_[thread.number / kLanes].copies;
    const int row = shared_.row(shared, "copy_16_bytes");
    if (thread.copies_of_step == copies.size()) copies.emplace_back().fill(kNoRow);
    copies[thread.copies_of_step++][lane()] = row;
    const Copy copy{shared, global_or_null, thread.group};
    if (!kCopiesLater) return copy.arrive();
    std::memset(shared, test::Buffer::kUntouched, kRowBytes);
    thread.copies.push_back(copy);
  }

  void commit() { ++running_->group; }

  void wait(int may_run) {
    Thread& thread = *running_;
    size_t arrived = 0;
    for (; arrived < thread.copies.size() && thread.copies[arrived].group < thread.group - may_run; ++arrived) {
      thread.copies[arrived].arrive();
    }
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + arrived);
  }

  // Where the block is, for what a mistake says.
  std::string where() const { return "block " + std::to_string(block_); }

  Counters counters;

 private:
  using Rows = std::array<int, kLanes>;

  struct Warp {
    enum { runs, at_barrier, ended } state;
    std::vector<Rows> copies;  // of the step, where each goes to: the n-th ones of all lanes are done together
  };

  void start(int number) {
    Thread& thread = threads_[number];
    thread.number = number;
    thread.copies.clear();
    thread.group = 0, thread.copies_of_step = 0;
    thread.fiber.start(stacks_[number], number, [] { current_->run_thread(); });
  }

  // The life of a fiber.
  void run_thread() {
    Fiber::arrived();
    try {
      grid_.kernel();
      if (!running_->copies.empty()) throw Mistake("ended before its copies have arrived");
      running_->at = nullptr;
    } catch (const Mistake& mistake) {
      mistake_ = where() + ", thread " + std::to_string(thread()) + ": " + mistake.what();
      turn_ = kLanes;
    }
    leave();
  }

  void leave() {
    Thread& thread = *running_;
    ++turn_;
    if (turn_ < kLanes) running_ = step_[turn_];
    thread.fiber.switch_to(turn_ < kLanes ? running_->fiber : scheduler_);
  }

  int first_of(int n) {
    if (settings.order == Order::random) return random_.below(n);
    return settings.order == Order::ascending ? 0 : n - 1;
  }

  // Runs every warp until it waits for the others. False: the block has ended.
  bool run_to_barrier() {
    std::vector<int> ready(warps_.size());
    std::iota(ready.begin(), ready.end(), 0);
    while (!ready.empty()) {
      const int i = first_of(static_cast<int>(ready.size()));
      step(ready[i]);
      if (warps_[ready[i]].state != Warp::runs) ready.erase(ready.begin() + i);
    }
    const Thread& first = threads_[0];
    for (const Thread& thread : threads_) {
      if (!together(first, thread)) throw Mistake(where() + ": " + state_of("warp", 0, grid_.threads, kLanes));
    }
    if (!first.at) return false;
    run(*first.at, 0, grid_.threads);
    ++counters.barriers;
    for (Warp& warp : warps_) warp.state = Warp::runs;
    return true;
  }

  void step(int warp) {
    const int first = warp * kLanes;
    for (int i = 0; i < kLanes; ++i) step_[i] = &threads_[first + i];
    in_order(step_.begin(), step_.end(), settings.order, random_);
    turn_ = 0;
    running_ = step_[0];
    counters.switches += kLanes;
    scheduler_.switch_to(running_->fiber);
    if (!mistake_.empty()) throw Mistake(mistake_);
    count_copies(warps_[warp]);

    const Thread& any = threads_[first];
    for (int i = 0; i < kLanes; ++i) {
      if (!together(any, threads_[first + i])) {
        throw Mistake(where() + ", warp " + std::to_string(warp) + ": " + state_of("lane", first, kLanes, 1));
      }
      threads_[first + i].copies_of_step = 0;
    }
    if (any.at && !any.at->is_barrier) return run(*any.at, first, kLanes);
    warps_[warp].state = any.at ? Warp::at_barrier : Warp::ended;
  }

  void run(const Instruction& instruction, int first, int threads) {
    for (int i = 0; i < threads; ++i) operands_[i] = threads_[first + i].operands;
    try {
      instruction.run(*this, operands_.data(), threads);
    } catch (const Mistake& mistake) {
      throw Mistake(where() + ", warp " + std::to_string(first / kLanes) + ": " + mistake.what() +
                    text(threads_[first]));
    }
  }

  void count_copies(Warp& warp) {
    for (const Rows& rows : warp.copies) {
      for (int first = 0; first < kLanes; first += kRowsTogether) {
        const bool any = std::any_of(&rows[first], &rows[first] + kRowsTogether, [](int row) { return row != kNoRow; });
        counters.copies += any;
        counters.copy_conflicts += extra_wavefronts(&rows[first]);
      }
    }
    warp.copies.clear();
  }

  static bool together(const Thread& x, const Thread& y) {
    return x.at == y.at && (!x.at || (x.place.line() == y.place.line() && x.place.column() == y.place.column()));
  }

  static std::string text(const Thread& thread) {
    std::string file = thread.place.file_name();
    file.erase(0, file.rfind('/') + 1);
    return " (" + file + ":" + std::to_string(thread.place.line()) + ")";
  }

  // "lanes 0-15 wait at a shuffle (x.cuh:7), lanes 16-31 have ended", of every stride-th thread.
  std::string state_of(const std::string& noun, int first, int threads, int stride) const {
    std::string all;
    for (int i = 0, next; i < threads; i = next) {
      const Thread& thread = threads_[first + i];
      for (next = i + stride; next < threads && together(thread, threads_[first + next]); next += stride) {
      }
      const int from = i / stride, to = next / stride - 1;
      if (!all.empty()) all += ", ";
      all += noun;
      all += from == to ? " " : "s ";
      all += std::to_string(from);
      if (from != to) all += "-" + std::to_string(to);
      if (thread.at) {
        all += from == to ? " waits at " : " wait at ";
        all += thread.at->name + text(thread);
      } else {
        all += from == to ? " has ended" : " have ended";
      }
    }
    return all;
  }

  static inline thread_local Multiprocessor* current_ = nullptr;

  const Grid& grid_;
  Shared shared_;
  LentStacks stacks_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  int64_t block_ = 0;
  Random random_{0};
  Fiber scheduler_;
  std::array<Thread*, kLanes> step_;  // the lanes of the step, in the order of their turns
  int turn_ = 0;
  Thread* running_ = nullptr;
  std::array<void*, kMostThreads> operands_;  // of the instruction that is done
  std::string mistake_;                       // of a thread
};

}  // namespace fastattn::cuda::model
