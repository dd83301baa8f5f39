// The device, of which there is one. What is allocated under its guard is memory that launches may use.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace c10::cuda {

// Beginnings and ends.
inline std::vector<uint64_t> allocated;

struct Recording : Allocator {
  Allocator* from = nullptr;

  DataPtr allocate(size_t bytes) override {
    DataPtr result = from->allocate(bytes);
    const auto begin = reinterpret_cast<uint64_t>(result.get());
    allocated.insert(allocated.end(), {begin, begin + bytes});
    return result;
  }
  DeleterFnPtr raw_deleter() const override { return from->raw_deleter(); }
  void copy_data(void* to, const void* source, size_t bytes) const override { from->copy_data(to, source, bytes); }
};

class CUDAGuard {
  static inline Recording recording_;

 public:
  explicit CUDAGuard(Device) {
    allocated.clear();
    recording_.from = GetCPUAllocator();
    SetCPUAllocator(&recording_);
  }
  ~CUDAGuard() { SetCPUAllocator(recording_.from); }
};

}  // namespace c10::cuda
