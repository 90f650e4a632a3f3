// The device as PyTorch sees it: allocator, guard, hooks, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

namespace tandem {

c10::Allocator* allocator();
// A storage's memory on a device, whichever is current.
// Whether new memory is to be filled: the program asked for deterministic algorithms.
bool fills_new_memory();

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes);
// The calling thread's current device.
c10::DeviceIndex current_device();
// The index that a device of ours means, which must exist; without one, the current device.
c10::DeviceIndex index_of(c10::Device device);
// The CPU generator that a generator of this device draws from.
at::Generator host_generator(const at::Generator& g);
// Whether a generator's state is read and set in program order: this device's are, and PyTorch's default one; others that
// the program makes for the CPU are not.
bool is_ordered(const at::Generator& g);
void register_hooks();
void count_host_calls();
void register_cuda_guard();

}  // namespace tandem
