// Generators of this device, each of which draws from a CPU generator.
#pragma once

#include <ATen/core/Generator.h>

namespace tandem {

// The device's default generator. It draws from PyTorch's default CPU generator.
const at::Generator& default_generator();
// Creates a generator of this device, with a new CPU generator.
at::Generator new_generator();
// The CPU generator that a generator of this device draws from. Returns a CPU generator unchanged.
at::Generator host_generator(const at::Generator& g);
// Whether reads and writes of a generator's state wait for earlier draws. This is so for generators of this device and
// for PyTorch's default CPU generator, but not for other CPU generators of the program.
bool is_ordered(const at::Generator& g);

}  // namespace tandem
