// CPU kernels of attention with dropout, for calls that a device does not compute itself. A seed determines the dropped
// weights, so a forward pass and its backward pass may run in different places.
#include <ATen/ATen.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace tandem {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// Factors of the weights: 0 for a dropped weight. Philox's counters are numbered by rows of weights, and each serves
// four weights.
Tensor philox_mask(const Tensor& like, const Tensor& seed, double dropout) {
  const auto words = seed.contiguous();
  const auto* key = words.const_data_ptr<int32_t>();
  const auto seed64 = uint64_t{static_cast<uint32_t>(key[1])} << 32 | static_cast<uint32_t>(key[0]);
  const float stay = 1.0f - static_cast<float>(dropout);
  auto mask = at::empty(like.sizes(), like.options().dtype(at::kFloat));
  const int64_t length = like.size(-1), counters = (length + 3) / 4;
  auto* to = mask.mutable_data_ptr<float>();
  for (int64_t row = 0; row < like.numel() / length; row++)
    for (int64_t c = 0; c < counters; c++) {
      at::Philox4_32 engine(seed64, 0, static_cast<uint64_t>(row * counters + c));
      for (int64_t i = 4 * c; i < 4 * c + 4; i++) {
        const auto word = engine();
        if (i < length) *to++ = static_cast<float>(word >> 8) * 0x1p-24f < stay ? 1.0f / stay : 0.0f;
      }
    }
  return mask;
}

// Keys or values, repeated so that each head of the queries has a head.
Tensor for_all_heads(const Tensor& x, int64_t heads) {
  return (x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1)).to(at::kFloat);
}

Tensor scores(const Tensor& query, const Tensor& key, const OptTensor& mask, bool causal, double factor) {
  auto s = at::matmul(query.to(at::kFloat), key.transpose(-2, -1)).mul_(factor);
  if (mask.has_value() && mask->defined()) s = s + *mask;
  if (causal) {
    const auto later = at::ones({s.size(-2), s.size(-1)}, s.options().dtype(at::kBool)).triu(1);
    s = s.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return s;
}

double factor_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

// Softmax of scores, from the logarithms of the sums of their exponentials. In a row without any counting score, the
// weights are 0.
Tensor weights_of(const Tensor& s, const Tensor& sums) {
  const auto counts = s > -std::numeric_limits<double>::infinity();
  return (s - sums.unsqueeze(-1)).exp().masked_fill(counts.logical_not(), 0);
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask,
                                   const Tensor& seed, double dropout, bool causal, std::optional<double> scale) {
  const auto heads = query.size(1);
  const auto s = scores(query, for_all_heads(key, heads), mask, causal, factor_of(query, scale));
  const auto sums = s.logsumexp(-1).nan_to_num(0, {}, 0);
  const auto weights = weights_of(s, sums).mul_(philox_mask(s, seed, dropout));
  auto out = at::empty_like(query);
  out.copy_(at::matmul(weights, for_all_heads(value, heads)));
  return {out, sums};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                            const Tensor& value, const OptTensor& mask, const Tensor& seed,
                                            const Tensor& out, const Tensor& sums, double dropout, bool causal,
                                            std::optional<double> scale) {
  const auto heads = query.size(1);
  const auto factor = factor_of(query, scale);
  const auto k = for_all_heads(key, heads), g = grad.to(at::kFloat);
  const auto weights = weights_of(scores(query, k, mask, causal, factor), sums);
  const auto kept = philox_mask(weights, seed, dropout);
  const auto of_weights = at::matmul(g, for_all_heads(value, heads).transpose(-2, -1)).mul_(kept);
  const auto delta = (g * out).sum(-1, /*keepdim=*/true);
  const auto of_scores = weights * (of_weights - delta) * factor;
  // Adds up the gradients of the heads that share keys and values.
  const auto shared = [&](const Tensor& x) {
    if (key.size(1) == heads) return x;
    return x.view({x.size(0), key.size(1), heads / key.size(1), x.size(2), x.size(3)}).sum(2);
  };
  const auto of_key = shared(at::matmul(of_scores.transpose(-2, -1), query.to(at::kFloat)));
  const auto of_value = shared(at::matmul((weights * kept).transpose(-2, -1), g));
  const auto dtype = query.scalar_type();
  return {at::matmul(of_scores, k).to(dtype), of_key.to(dtype), of_value.to(dtype)};
}

}  // namespace

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("attention", forward);
  m.impl("attention_backward", backward);
}

}  // namespace tandem
