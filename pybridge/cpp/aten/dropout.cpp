// Dropout with the operators that PyTorch uses on the CPU. For a PrivateUse1 device PyTorch would call the fused
// native_dropout, whose scale is rounded differently for some probabilities.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace tandem {

namespace {

// Draws ones with probability `p` in the order of the elements in memory, as bernoulli_ does. torch.compile replaces
// bernoulli_ by bernoulli, which draws in the order of indices. Both orders are the same for a contiguous tensor.
at::Tensor draw(const at::Tensor& to, double p) {
  if (to.is_contiguous()) return to.bernoulli_(p);
  std::vector<int64_t> order(to.dim()), inverse(to.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto strides = to.sym_strides();
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  for (size_t i = 0; i < order.size(); i++) inverse[order[i]] = static_cast<int64_t>(i);
  return at::bernoulli(to.permute(order), p).permute(inverse);
}

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  const auto real = input.options().dtype(c10::toRealValueType(input.scalar_type()));
  return input.mul(draw(at::empty_like(input, real), 1 - p).div_(1 - p));
}

}  // namespace

// Registered both above autograd, because dropout consists of differentiable operators, and below autograd, for
// inference mode.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("dropout", dropout); }

}  // namespace tandem
