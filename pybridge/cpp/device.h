// The device as PyTorch sees it: allocator, guard, hooks, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

namespace tandem {

c10::Allocator* allocator();
// The CPU generator that a generator of this device draws from.
at::Generator host_generator(const at::Generator& g);
void register_hooks();
void register_cuda_guard();

}  // namespace tandem
