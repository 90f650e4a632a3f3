#pragma once

#include <torch/csrc/autograd/function.h>

namespace tandem {

// Returns the autograd node that `Pass` is running on this thread, or null.
const torch::autograd::Node* running_node();

}  // namespace tandem
