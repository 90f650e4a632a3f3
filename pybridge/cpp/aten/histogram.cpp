// torch.histc of integers, which PyTorch has for CUDA but not for the CPU. Libraries only ask whether a tensor is on
// the CPU, so they expect it here. It is composed of captured operators, and returns CUDA's results.
#include <ATen/ATen.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "calls/call.h"
#include "calls/operators.h"

namespace tandem {

namespace {

// The histogram with the dtype of `self`. Bins are computed in 64-bit integers. If the bounds are equal, the least and
// the greatest element replace them.
at::Tensor histogram(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  TORCH_CHECK(bins > 0, "bins must be > 0");
  const auto x = self.flatten().to(at::kLong);
  auto least = at::full({}, min.to<int64_t>(), x.options()), most = at::full({}, max.to<int64_t>(), x.options());
  TORCH_CHECK(min.to<int64_t>() <= max.to<int64_t>(), "max must be larger than min");
  if (min.to<int64_t>() == max.to<int64_t>()) {
    if (x.numel() > 0) least = x.min(), most = x.max();
    const auto are_equal = least.eq(most).to(at::kLong);
    least = least - are_equal, most = most + are_equal;
  }
  const auto bin = ((x - least) * bins).div(most - least, "trunc").clamp_max(bins - 1);
  // Elements outside of the bounds are counted in an additional bin, which is then dropped.
  const auto counted = at::where((x >= least).logical_and(x <= most), bin, bins);
  const auto counts = at::zeros({bins + 1}, x.options()).scatter_add_(0, counted, at::ones_like(x));
  return counts.narrow(0, 0, bins).to(self.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

// `histc` or, with `is_out`, its overload that writes an existing tensor.
template <bool is_out>
void histc(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  static const uint32_t op = declare(handle);
  const size_t n = handle.schema().arguments().size();
  const auto argument = [&](size_t i) -> const c10::IValue& { return torch::jit::peek(*stack, i, n); };
  const auto self = argument(0).toTensor();
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return dispatch(op, handle, stack);
  auto result = histogram(self, argument(1).toInt(), argument(2).toScalar(), argument(3).toScalar());
  if constexpr (is_out) {
    auto out = argument(4).toTensor();
    at::native::resize_output(out, result.sizes());
    result = out.copy_(result);
  }
  torch::jit::drop(*stack, n);
  torch::jit::push(*stack, std::move(result));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc<false>>());
  m.impl("histc.out", torch::CppFunction::makeFromBoxedFunction<&histc<true>>());
}

}  // namespace tandem
