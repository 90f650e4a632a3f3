#include "host_gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "device_type.h"

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
      metadata.options().device(c10::Device(kTandem, device)),
      torch::autograd::SymIntSmallVec(sizes.begin(), sizes.end()), /*is_tensor_subclass=*/true,
      metadata.is_nested_tensor(), metadata.grad_dtype());
  // InputMetadata has const members and cannot be assigned to.
  std::destroy_at(&metadata);
  std::construct_at(&metadata, std::move(tolerant));
  edge.function->add_pre_hook(std::make_unique<MoveToHost>());
}

}  // namespace tandem
