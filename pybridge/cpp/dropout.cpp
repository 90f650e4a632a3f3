// Dropout with the operators that PyTorch uses on the CPU. For a PrivateUse1 device PyTorch would call the fused
// native_dropout, whose scale is rounded differently for some probabilities.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace tandem {

namespace {

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  const auto real = input.options().dtype(c10::toRealValueType(input.scalar_type()));
  return input.mul(at::empty_like(input, real).bernoulli_(1 - p).div_(1 - p));
}

}  // namespace

// Registered above autograd, because it consists of differentiable operators, and below autograd for inference mode.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("dropout", dropout); }

}  // namespace tandem
