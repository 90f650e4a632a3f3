// Sparse tensors of this device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tandem {

// Registers an operator for sparse tensors of this device, if PyTorch has the operator for sparse tensors on the host.
void implement_sparse(const c10::OperatorHandle& op);
// Makes "cuda" mean this device for sparse tensors.
void alias_sparse();

}  // namespace tandem
