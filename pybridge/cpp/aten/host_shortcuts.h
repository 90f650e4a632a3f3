// Composite operators that PyTorch computes in a shorter way on its CPU device, where no gradient is needed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tandem {

// Captures the call whole if the operator has such a way, the cpu executor runs it, and its tensors are plain and need no
// gradients. Otherwise returns false, and nothing has happened.
bool capture_with_shortcut(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace tandem
