// See host_memory.cpp.
#pragma once

namespace tandem {

// While it lives, this thread's CPU tensors are made in Tandem's pool.
struct PoolGuard {
  PoolGuard();
  ~PoolGuard();
};

void register_host_allocator();

}  // namespace tandem
