// Registries of aten kernels that are kept for the lifetime of the process.
#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

namespace tandem {

// The registry of aten kernels for a dispatch key.
torch::Library& library(c10::DispatchKey key);

}  // namespace tandem
