#pragma once

#include <torch/csrc/autograd/function.h>

namespace tandem {

// The node that our backward runs on this thread, or null.
const torch::autograd::Node* running_node();

}  // namespace tandem
