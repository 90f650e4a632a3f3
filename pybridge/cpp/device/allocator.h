// Memory of tandem storages: PyTorch's allocator for this device, and its statistics.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace tandem {

c10::Allocator* allocator();
// Allocates a storage's memory on a device, which need not be the current one.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes);
// Whether uninitialized memory must be filled because the program uses deterministic algorithms.
bool fills_new_memory();
void register_allocator();

}  // namespace tandem
