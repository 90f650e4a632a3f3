// Host memory for the results of kernels.
#pragma once

#include <c10/core/StorageImpl.h>

namespace tandem {

// Makes PyTorch's CPU allocator use Tandem's pool on this thread, for the lifetime of the object.
struct PoolGuard {
  PoolGuard();
  ~PoolGuard();
};

void register_host_allocator();

// Returns a storage of `nbytes` uninitialized bytes, owned by the caller, or null if `nbytes` is 0 or more than 4 KiB.
c10::StorageImpl* take_small(size_t nbytes);
// Keeps a storage from take_small() for reuse, and takes over the caller's reference. Returns false, and takes nothing,
// in these cases: the storage has other references, it is not from take_small(), or enough storages are kept.
bool keep_small(c10::StorageImpl* storage);

}  // namespace tandem
