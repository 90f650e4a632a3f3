// Random operators on host tensors. They draw from the same generator as GraphRunner, so draws must be in the program's
// order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tandem {

// Makes an aten operator wait for pending draws if it is a random operator with a CPU kernel.
void order_host_random(const c10::OperatorHandle& op);

}  // namespace tandem
