// See host_memory.cpp.
#pragma once

#include <c10/core/StorageImpl.h>

namespace tandem {

// While it lives, this thread's CPU tensors are made in Tandem's pool.
struct PoolGuard {
  PoolGuard();
  ~PoolGuard();
};

void register_host_allocator();

// A storage of so many undefined bytes, owned by the caller; null where they are not few.
c10::StorageImpl* take_small(size_t nbytes);
// Keeps such a storage, which the caller owns, for the next one; false where somebody else holds it too, or it is another.
bool keep_small(c10::StorageImpl* storage);

}  // namespace tandem
