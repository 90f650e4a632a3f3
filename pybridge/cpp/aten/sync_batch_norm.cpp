// The operators that torch.nn.SyncBatchNorm calls. PyTorch has kernels for them on CUDA alone. Each kernel here
// consists of a few operators, which are captured.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

namespace tandem {

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// All dimensions except the channels' dimension.
std::vector<int64_t> others(const Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); d++)
    if (d != 1) dims.push_back(d);
  return dims;
}

// Reshapes one number for each channel so that it broadcasts with `x`.
Tensor along(const Tensor& channels, const Tensor& x) {
  std::vector<int64_t> sizes(x.dim(), 1);
  sizes[1] = channels.numel();
  return channels.view(sizes);
}

// Converts a tensor to the dtype of the statistics, which is float for half precision.
Tensor widened(const Tensor& x) { return x.to(at::toOpMathType(x.scalar_type())); }

bool is_given(const Maybe& t) { return t && t->defined(); }

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(widened(input), others(input), /*correction=*/at::Scalar(0));
  return {mean, at::rsqrt(variance + eps)};
}

std::tuple<Tensor, Tensor> gather(const Tensor& mean, const Tensor& invstd, const Maybe& running_mean,
                                  const Maybe& running_var, double momentum, double eps, const Tensor& counts) {
  const auto count = counts.to(mean.scalar_type()).view({-1, 1}), total = count.sum();
  const auto together = (mean * count).sum(0) / total;
  const auto squares = ((invstd.pow(-2) - eps + (mean - together).square()) * count).sum(0);
  if (is_given(running_mean)) running_mean->mul_(1 - momentum).add_(together, momentum);
  if (is_given(running_var)) running_var->mul_(1 - momentum).add_(squares / (total - 1), momentum);
  return {together, at::rsqrt(squares / total + eps)};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(const Tensor&, const Tensor& mean, const Tensor& invstd,
                                                               const Maybe& running_mean, const Maybe& running_var,
                                                               double momentum, double eps, const Tensor& counts) {
  return gather(mean, invstd, running_mean, running_var, momentum, eps, counts);
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats(const Tensor&, const Tensor& mean, const Tensor& invstd,
                                                   const Maybe& running_mean, const Maybe& running_var, double momentum,
                                                   double eps, int64_t count) {
  return gather(mean, invstd, running_mean, running_var, momentum, eps,
                at::full({mean.size(0)}, count, mean.options()));
}

Tensor batch_norm_elemt(const Tensor& input, const Maybe& weight, const Maybe& bias, const Tensor& mean,
                        const Tensor& invstd, double) {
  auto scale = invstd;
  if (is_given(weight)) scale = scale * *weight;
  auto result = (widened(input) - along(mean, input)) * along(scale, input);
  if (is_given(bias)) result = result + along(*bias, input);
  return result.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_out, const Tensor& input,
                                                                      const Tensor& mean, const Tensor& invstd,
                                                                      const Maybe& weight, bool input_g, bool weight_g,
                                                                      bool bias_g) {
  const auto grad = widened(grad_out);
  const auto dims = others(input);
  const auto sum = grad.sum(dims);
  const auto with_input = (grad * (widened(input) - along(mean, input))).sum(dims);
  Tensor grad_weight, grad_bias;
  if (weight_g) grad_weight = with_input * invstd;
  if (bias_g) grad_bias = sum.clone();
  if (is_given(weight)) {
    if (weight_g) grad_weight = grad_weight.to(weight->scalar_type());
    if (bias_g) grad_bias = grad_bias.to(weight->scalar_type());
  }
  return {input_g ? sum : Tensor(), input_g ? with_input : Tensor(), grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                 const Maybe& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                                 const Tensor& count) {
  const auto total = count.sum();
  auto scale = invstd;
  if (is_given(weight)) scale = scale * *weight;
  const auto slope = sum_dy_xmu / total * invstd.square();
  const auto grad =
      widened(grad_out) - along(sum_dy / total, input) - (widened(input) - along(mean, input)) * along(slope, input);
  return (grad * along(scale, input)).to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_gather_stats", batch_norm_gather_stats);
  m.impl("batch_norm_elemt", batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", batch_norm_backward_elemt);
}

}  // namespace tandem
