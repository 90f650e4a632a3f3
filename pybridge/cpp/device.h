// PyTorch's interfaces to the device: allocator, guard, hooks, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

namespace tandem {

c10::Allocator* allocator();
// Whether uninitialized memory must be filled because the program uses deterministic algorithms.
bool fills_new_memory();

// Allocates a storage's memory on a device, which need not be the current one.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes);
// The calling thread's current device.
c10::DeviceIndex current_device();
// Returns the index of a tandem device, or that of the current device if `device` has none. Throws if there is no such
// device.
c10::DeviceIndex index_of(c10::Device device);
// The CPU generator that a generator of this device draws from.
at::Generator host_generator(const at::Generator& g);
// Whether reads and writes of a generator's state wait for earlier draws. They do for generators of this device and for
// PyTorch's default CPU generator, but not for other CPU generators of the program.
bool is_ordered(const at::Generator& g);
void register_hooks();
void count_host_calls();
void register_cuda_guard();

}  // namespace tandem
