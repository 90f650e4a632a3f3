#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <vector>

namespace tandem {

// A node that stands for several nodes, each of which has computed some of its outputs.
struct StepwiseNode : torch::autograd::Node {
  // The number of outputs of each of the nodes, in the order in which the nodes would have run.
  virtual const std::vector<size_t>& steps() const = 0;
};

// Returns the autograd node that `Pass` is running on this thread, or null.
const torch::autograd::Node* running_node();
// Whether code of the program runs in a node or in its hooks.
bool runs_program(torch::autograd::Node& node);
// Runs a backward pass while a node of another pass runs. Returns the gradients that arrive at `inputs`. The graph is
// kept.
torch::autograd::variable_list run_within(torch::autograd::edge_list roots, torch::autograd::variable_list grads,
                                          const torch::autograd::edge_list& inputs);

}  // namespace tandem
