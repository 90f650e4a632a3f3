// Host memory for kernels' results: PyTorch's CPU allocator, with Tandem's pool behind it while a kernel runs for Tandem.
#include "host_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "shim.h"

namespace tandem {

namespace {

thread_local int pooled = 0;

c10::Allocator* system_allocator() {
  static auto* allocator = c10::GetDefaultCPUAllocator();
  return allocator;
}

void give_back(void* block) {
  if (!tt_pool_give(block)) system_allocator()->raw_deleter()(block);
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (pooled > 0)
      if (void* block = tt_pool_take(nbytes)) return {block, block, &give_back, c10::DeviceType::CPU};
    return system_allocator()->allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

}  // namespace

PoolGuard::PoolGuard() { pooled++; }
PoolGuard::~PoolGuard() { pooled--; }

void register_host_allocator() {
  static HostAllocator allocator;
  // Another allocator that somebody has set stays.
  if (c10::GetCPUAllocator() == system_allocator()) c10::SetCPUAllocator(&allocator);
}

}  // namespace tandem
