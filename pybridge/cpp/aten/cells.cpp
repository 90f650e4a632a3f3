// CPU kernels of the fused LSTM and GRU cells. PyTorch's recurrent layers call these operators on a PrivateUse1 device,
// but PyTorch has no CPU kernels for them. The workspaces hold values for the backward kernels, such as activated
// gates.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace tandem {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

bool present(const OptTensor& t) { return t.has_value() && t->defined(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptTensor& input_bias, const OptTensor& hidden_bias) {
  const auto gates = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
  const auto parts = gates.chunk(4, 1);
  const auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptTensor& grad_hy, const OptTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!present(grad_hy) && !present(grad_cy)) return {};
  const auto parts = workspace.chunk(4, 1);
  const auto &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const auto tanh_cy = cy.tanh();
  auto grad_c = present(grad_cy) ? *grad_cy : at::zeros_like(cx);
  auto grad_o = at::zeros_like(o);
  if (present(grad_hy)) {
    grad_o = *grad_hy * tanh_cy * (o * (1 - o));
    grad_c = grad_c + at::tanh_backward(*grad_hy * o, tanh_cy);
  }
  const auto grad_gates =
      at::cat({grad_c * g * (i * (1 - i)), grad_c * cx * (f * (1 - f)), grad_c * i * (1 - g * g), grad_o}, 1);
  return {grad_gates, grad_c * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptTensor& input_bias, const OptTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = (hidden[0] + in[0]).sigmoid(), z = (hidden[1] + in[1]).sigmoid();
  const auto n = (in[2] + hidden[2] * r).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hidden_n = parts[4];
  const auto grad_n = grad_hy * (1 - z) * (1 - n * n);
  const auto grad_z = grad_hy * (hx - n) * (z * (1 - z));
  const auto grad_r = grad_n * hidden_n * (r * (1 - r));
  const auto grad_in = at::cat({grad_r, grad_z, grad_n}, 1);
  const auto grad_hidden = at::cat({grad_r, grad_z, grad_n * r}, 1);
  return {grad_in, grad_hidden, grad_hy * z, has_bias ? grad_in.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace tandem
