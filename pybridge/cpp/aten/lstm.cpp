// nn.LSTM with the operator that PyTorch uses on the CPU: oneDNN's layer, which computes all time steps. On a PrivateUse1
// device, PyTorch would call a product and a fused cell for each time step.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/lstm_native.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "boundary/shim.h"
#include "device/device_type.h"

namespace tandem {

namespace {

using at::Tensor;
using State = std::tuple<Tensor, Tensor, Tensor>;

// oneDNN's number for the kind of layer.
constexpr int64_t kLstm = 2;

// PyTorch's condition for oneDNN's layer on the CPU (use_mkldnn in ATen/native/RNN.cpp), for float32.
bool uses_layer(const Tensor& input, at::TensorList hx, at::TensorList params) {
  const auto is_usable = [](const Tensor& t) {
    return t.defined() && t.device().type() == kTandem && t.scalar_type() == at::kFloat &&
           !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
           !t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  };
  return tt_is_cpu() && at::globalContext().userEnabledMkldnn() && !at::autocast::is_autocast_enabled(kTandem) &&
         hx.size() == 2 && is_usable(input) && input.numel() != 0 && std::all_of(hx.begin(), hx.end(), is_usable) &&
         std::all_of(params.begin(), params.end(), is_usable) && hx[0].size(2) == hx[1].size(2);
}

State lstm(const Tensor& input, at::TensorList hx, at::TensorList params, bool has_biases, int64_t num_layers,
           double dropout, bool train, bool bidirectional, bool batch_first) {
  if (!uses_layer(input, hx, params))
    return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  auto x = (batch_first ? input.transpose(0, 1) : input).contiguous();
  const auto h = hx[0].contiguous(), c = hx[1].contiguous();
  const int64_t directions = bidirectional ? 2 : 1, weights = has_biases ? 4 : 2;
  std::vector<Tensor> hy, cy;
  for (int64_t layer = 0; layer < num_layers; layer++) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; direction++) {
      const auto index = layer * directions + direction;
      const auto* w = &params[index * weights];
      const auto bias = [&](size_t i) { return has_biases ? w[2 + i] : at::zeros(w[i].sizes(), w[i].options()); };
      auto [y, last_h, last_c, workspace] = at::mkldnn_rnn_layer(
          x, w[0], w[1], bias(0), bias(1), h[index], c[index], /*reverse=*/direction > 0,
          /*batch_sizes=*/{}, kLstm, h.size(2), num_layers, has_biases, bidirectional, batch_first, train);
      outputs.push_back(std::move(y)), hy.push_back(std::move(last_h)), cy.push_back(std::move(last_c));
    }
    x = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer < num_layers - 1) x = at::dropout(x, dropout, /*train=*/true);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(hy, 0), at::stack(cy, 0)};
}

}  // namespace

// Registered both above autograd, because the layer consists of differentiable operators, and below autograd, for
// inference mode.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("lstm.input", lstm); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("lstm.input", lstm); }

}  // namespace tandem
