// Capture: the dispatcher calls that go to Rust.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tandem {

// Registers a capturing kernel for an aten operator, unless PyTorch's own kernel for it only calls captured operators.
void capture(const c10::OperatorHandle& op);

}  // namespace tandem
