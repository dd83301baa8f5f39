// Fibers: stacks that one thread of the operating system works on in turn. A switch is a call that returns on another
// stack; it costs a dozen instructions, and AddressSanitizer is told of it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && defined(__linux__) && !defined(FASTATTN_MODEL_UCONTEXT)
#define FASTATTN_MODEL_SWITCHES_STACKS
// switch(rdi: where to leave this stack's pointer, rsi: the pointer of the other stack). What a call must preserve lies
// on the stack that it belongs to. Callers know nothing of this function, so that they keep nothing else in registers.
asm(R"(
.text
.weak fastattn_switch_stacks
.type fastattn_switch_stacks, @function
fastattn_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastattn_switch_stacks, . - fastattn_switch_stacks
)");
extern "C" void fastattn_switch_stacks(void** from, void* to);
#else
#include <ucontext.h>
#endif

namespace fastattn::cuda::model {

// Memory for stacks; a page that nobody may touch lies below each. What is never used costs nothing.
class Stacks {
 public:
  Stacks() : guard_(sysconf(_SC_PAGESIZE)) {
    void* mapped = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(mapped);
    for (int i = 0; i < kCount; ++i) {
      if (mprotect(memory_ + i * (guard_ + kBytes), guard_, PROT_NONE) != 0) throw std::bad_alloc();
    }
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() { munmap(memory_, bytes()); }

  static constexpr int kCount = 1024;
  static constexpr size_t kBytes = 128 << 10;

  char* operator[](int i) const { return memory_ + i * (guard_ + kBytes) + guard_; }

 private:
  size_t bytes() const { return kCount * (guard_ + kBytes); }

  size_t guard_;
  char* memory_;
};

// Stacks that go to another user afterwards: to make them takes longer than a small launch.
class LentStacks {
 public:
  LentStacks() {
    const std::lock_guard guard(lock_);
    if (spare_.empty()) spare_.push_back(std::make_unique<Stacks>());
    stacks_ = std::move(spare_.back());
    spare_.pop_back();
  }
  ~LentStacks() {
    const std::lock_guard guard(lock_);
    spare_.push_back(std::move(stacks_));
  }

  char* operator[](int i) const { return (*stacks_)[i]; }

 private:
  static inline std::mutex lock_;
  static inline std::vector<std::unique_ptr<Stacks>> spare_;
  std::unique_ptr<Stacks> stacks_;
};

class Fiber {
 public:
  // The fiber that runs already.
  Fiber() = default;

  // Lets the next switch to this fiber call `entry` on that stack, of Stacks::kBytes. `entry` begins with arrived() and
  // never returns. Fibers with other numbers begin at other addresses modulo the size of a page: else what they all
  // work on would share a few sets of the cache.
  void start(char* stack, int number, void (*entry)()) {
    constexpr int kApart = 128, kNumbers = 32;
    stack_ = stack, bytes_ = Stacks::kBytes;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_, bytes_);  // the marks of frames that were left for ever
#endif
    char* top = stack + Stacks::kBytes - number % kNumbers * kApart;
#if defined(FASTATTN_MODEL_SWITCHES_STACKS)
    constexpr int kSaved = 6;
    void** words = reinterpret_cast<void**>(top) - kSaved - 2;  // and where entry is, and where it would return to
    for (int i = 0; i < kSaved; ++i) words[i] = nullptr;
    words[kSaved] = reinterpret_cast<void*>(entry), words[kSaved + 1] = nullptr;
    pointer_ = words;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack, context_.uc_stack.ss_size = top - stack;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // To be called on the fiber that runs. Returns when another one switches back to it.
  void switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    left_ = this;
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, next.stack_, next.bytes_);
#endif
#if defined(FASTATTN_MODEL_SWITCHES_STACKS)
    fastattn_switch_stacks(&pointer_, next.pointer_);
#else
    swapcontext(&context_, &next.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
  }

  static void arrived() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &left_->stack_, &left_->bytes_);  // news for the fiber that ran already
#endif
  }

 private:
  const void* stack_ = nullptr;
  size_t bytes_ = 0;
#if defined(FASTATTN_MODEL_SWITCHES_STACKS)
  void* pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
#if defined(__SANITIZE_ADDRESS__)
  static inline thread_local Fiber* left_ = nullptr;
#endif
};

}  // namespace fastattn::cuda::model
