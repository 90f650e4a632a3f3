// Gradients of host tensors that are operands of ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace tandem {

// Lets the gradient of a host tensor that was fed to an op arrive from a tandem device.
void accept_device_gradient(const at::Tensor& host, c10::DeviceIndex device);
// Lets the gradient of a tandem tensor arrive from the host, because an op that wrote a host tensor has this operand.
void accept_host_gradient(const at::Tensor& tensor);

}  // namespace tandem
