// Storages of tandem tensors, each of which has a context that Rust made, and tensors on them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "boundary/shim.h"

namespace tandem {

// Returns the storage context of a tandem tensor. Creates one if the storage has none.
void* storage_context(const at::Tensor& t);
// Resizes a storage, which has this context.
void resize_storage(c10::StorageImpl& storage, void* context, size_t nbytes);
// Wraps a context that Rust created on a device in a StorageImpl.
c10::intrusive_ptr<c10::StorageImpl> adopt_storage(void* context, void* address, size_t nbytes,
                                                   c10::DeviceIndex device);
// Creates a tensor on a storage, with the window that a record describes.
at::Tensor window(c10::Storage storage, const TtOut& out);
// The bytes of a storage as a tensor.
at::Tensor bytes_of(c10::Storage storage);

}  // namespace tandem
