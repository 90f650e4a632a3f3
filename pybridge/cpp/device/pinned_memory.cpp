#include "device/pinned_memory.h"

#include <c10/core/impl/alloc_cpu.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

namespace tandem {

namespace {

// Allocates pinned memory as ordinary host memory. This is enough, because a host tensor is copied when it is fed. The
// address ranges are kept, so that `is_pinned()` can answer.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    auto* memory = c10::alloc_cpu(n);
    if (n > 0) {
      std::lock_guard<std::mutex> lock(mutex());
      ranges()[reinterpret_cast<uintptr_t>(memory)] = n;
    }
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }

  static bool contains(const void* pointer) {
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto above = ranges().upper_bound(at);
    return above != ranges().begin() && at < std::prev(above)->first + std::prev(above)->second;
  }

 private:
  static void free(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(reinterpret_cast<uintptr_t>(memory));
    }
    c10::free_cpu(memory);
  }
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  // Size by start address. The map is never destroyed, because tensors may be freed after static objects are destroyed.
  static std::map<uintptr_t, size_t>& ranges() {
    static auto* r = new std::map<uintptr_t, size_t>();
    return *r;
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator instance;
  return &instance;
}

bool is_pinned(const void* pointer) { return PinnedAllocator::contains(pointer); }

}  // namespace tandem
