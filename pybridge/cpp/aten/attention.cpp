// scaled_dot_product_attention chooses its kernel by device. This device gets the CPU's choice, except with dropout,
// for which PyTorch has no fused kernel on the CPU. A device that draws random numbers itself then calls
// tandem::attention, through the operator that PyTorch has for kernels of other devices.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "boundary/shim.h"

namespace tandem {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// Maximum number of dimensions of a head.
constexpr int64_t kWidest = 256;
// Maximum number of random counters. Each counter serves four weights.
constexpr int64_t kMostCounters = int64_t{1} << 32;

// Whether tandem::attention takes these tensors.
bool is_fused(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double dropout, bool grouped) {
  if (!(dropout > 0 && dropout < 1) || q.device().type() != c10::DeviceType::PrivateUse1 || !tt_draws()) return false;
  const auto dtype = q.scalar_type();
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) return false;
  if (q.is_nested() || k.is_nested() || v.is_nested() || q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return false;
  const auto queries = q.sym_sizes(), keys = k.sym_sizes();
  if (v.sym_sizes() != keys || k.scalar_type() != dtype || v.scalar_type() != dtype) return false;
  if (queries[0] != keys[0] || queries[3] != keys[3] || queries[3] > kWidest) return false;
  if (q.sym_numel() == 0 || k.sym_numel() == 0) return false;
  if (grouped ? queries[1] % keys[1] != 0 : queries[1] != keys[1]) return false;
  if (queries[0] * queries[1] * queries[2] * ((keys[2] + 3) / 4) >= kMostCounters) return false;
  return !mask.has_value() || !mask->requires_grad();
}

template <class... Args>
int64_t choose(Args... args) {
  const auto all = std::forward_as_tuple(args...);
  const bool grouped = std::get<7>(all);
  if (is_fused(std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all), std::get<4>(all), grouped))
    return static_cast<int64_t>(sdp::SDPBackend::overrideable);
  // The CPU's choice depends on metadata only, so the function may be called with tandem tensors.
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), args...);
}

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptTensor&, const Tensor&,
                                           double, bool, std::optional<double>);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const OptTensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    double, bool, std::optional<double>);

template <class Schema>
c10::TypedOperatorHandle<Schema> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

// _scaled_dot_product_fused_attention_overrideable. The seed is returned in place of Philox's state.
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask, double dropout, bool causal,
    bool, std::optional<double> scale) {
  static const auto op = operator_of<Forward>("tandem::attention");
  const auto seed = at::empty({2}, query.options().dtype(at::kInt)).random_();
  auto [out, sums] = op.call(query, key, value, mask, seed, dropout, causal, scale);
  return {out, sums, {}, {}, query.sym_size(2), key.sym_size(2), seed, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                    const Tensor& value, const Tensor& mask, std::array<bool, 4> wanted,
                                                    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&,
                                                    c10::SymInt, c10::SymInt, double dropout, bool causal,
                                                    const Tensor& seed, const Tensor&, std::optional<double> scale) {
  static const auto op = operator_of<Backward>("tandem::attention_backward");
  TORCH_CHECK(!wanted[3], "attention with dropout has no gradient for its mask; detach the mask");
  const auto given = mask.defined() ? OptTensor(mask) : std::nullopt;
  auto [q, k, v] = op.call(grad, query, key, value, given, seed, out, sums, dropout, causal, scale);
  return {q, k, v, {}};
}

}  // namespace

TORCH_LIBRARY(tandem, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor seed, float dropout_p, bool is_causal, "
      "float? scale) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor seed, Tensor out, "
      "Tensor logsumexp, float dropout_p, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward);
}

}  // namespace tandem

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &tandem::choose)

}  // namespace at::native
