// Autograd state for Rust: the running backward node, and whether backward passes stay on the calling thread.
#include <ATen/SequenceNumber.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "backward.h"
#include "device_type.h"
#include "values.h"

namespace tandem {

namespace {

// Moves gradients to the host before an edge's function receives them.
struct MoveToHost final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    torch::autograd::variable_list moved;
    for (const auto& g : grads) moved.push_back(g.defined() && !g.is_cpu() ? g.cpu() : g);
    return moved;
  }
};

}  // namespace

// The gradient of a fed host tensor arrives on a tandem device, which autograd would refuse. This function replaces the
// input metadata of the tensor's gradient edge: the metadata names the tandem device, and `is_tensor_subclass` disables
// the check for other devices. A pre-hook moves the gradient to the host. The expected device must be set because
// autograd cannot add gradients of host ops and of tandem ops at one edge.
void accept_device_gradient(const at::Tensor& host, c10::DeviceIndex device) {
  auto edge = torch::autograd::impl::gradient_edge(host);
  auto& metadata = edge.function->mutable_input_metadata(edge.input_nr);
  if (metadata.is_tensor_subclass()) return;
  const auto sizes = host.sym_sizes();
  torch::autograd::InputMetadata tolerant(
      metadata.options().device(c10::Device(kTandem, device)), torch::autograd::SymIntSmallVec(sizes.begin(), sizes.end()), /*is_tensor_subclass=*/true,
      metadata.is_nested_tensor(), metadata.grad_dtype());
  // InputMetadata has const members and cannot be assigned to.
  std::destroy_at(&metadata);
  std::construct_at(&metadata, std::move(tolerant));
  edge.function->add_pre_hook(std::make_unique<MoveToHost>());
}

}  // namespace tandem

extern "C" {

void ttc_site(TtSite* site) {
  site->sequence = at::sequence_number::peek();
  site->modes = static_cast<int32_t>(c10::get_default_dtype_as_scalartype()) << 1 | c10::GradMode::is_enabled();
  site->node = 0;
  const auto* node = tandem::running_node();
  if (!node) node = torch::autograd::get_current_node().get();
  if (node) {
    site->node_sequence = node->sequence_nr();
    // The address alone does not identify a node: a new node may have the address of a freed one.
    site->node = reinterpret_cast<uint64_t>(node) ^ (site->node_sequence << 48 | 1);
  }
}

void ttc_single_threaded_backward(int32_t on) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(!on);
}
}
