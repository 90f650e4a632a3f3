#include "calls/host_gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "device/device_type.h"

namespace tandem {

namespace {

// Moves gradients to a device before the function that an edge leads to receives them.
struct MoveTo final : torch::autograd::FunctionPreHook {
  explicit MoveTo(c10::Device device) : device_(device) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    torch::autograd::variable_list moved;
    for (const auto& g : grads) moved.push_back(g.defined() && g.device() != device_ ? g.to(device_) : g);
    return moved;
  }

 private:
  c10::Device device_;
};

// Lets the gradient of a tensor arrive from another device, which autograd would refuse. This function replaces the
// input metadata of the tensor's gradient edge: the metadata names the device `from`, and `is_tensor_subclass` disables
// the check for other devices. A pre-hook moves the gradient to the tensor's device. The expected device must be set
// because autograd cannot add gradients of host ops and of tandem ops at one edge.
void accept_gradient(const at::Tensor& tensor, c10::Device from) {
  auto edge = torch::autograd::impl::gradient_edge(tensor);
  // Views of leaves that were made without grad mode require grad but get no gradient.
  if (!edge.function) return;
  auto& metadata = edge.function->mutable_input_metadata(edge.input_nr);
  if (metadata.is_tensor_subclass()) return;
  const auto sizes = tensor.sym_sizes();
  torch::autograd::InputMetadata tolerant(
      metadata.options().device(from), torch::autograd::SymIntSmallVec(sizes.begin(), sizes.end()),
      /*is_tensor_subclass=*/true, metadata.is_nested_tensor(), metadata.grad_dtype());
  // InputMetadata has const members and cannot be assigned to.
  std::destroy_at(&metadata);
  std::construct_at(&metadata, std::move(tolerant));
  edge.function->add_pre_hook(std::make_unique<MoveTo>(tensor.device()));
}

}  // namespace

void accept_device_gradient(const at::Tensor& host, c10::DeviceIndex device) {
  accept_gradient(host, c10::Device(kTandem, device));
}

void accept_host_gradient(const at::Tensor& tensor) { accept_gradient(tensor, tensor.device()); }

}  // namespace tandem
