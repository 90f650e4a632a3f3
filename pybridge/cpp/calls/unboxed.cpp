// Registers the most frequently called operators with unboxed kernels.
#include <ATen/Operators.h>
#include <torch/library.h>

#include <string>

#include "calls/unboxed.h"

namespace tandem {

namespace {

// Registers one operator, a struct of at::_ops.
template <class Op>
void add(torch::Library& m) {
  std::string name(std::string_view(Op::name).substr(6));
  if (*Op::overload_name) name += std::string(".") + Op::overload_name;
  m.impl(name.c_str(), &Unboxed<Op, typename Op::schema>::call);
}

template <class... Ops>
void add_all(torch::Library& m) {
  (add<Ops>(m), ...);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  namespace op = at::_ops;
  add_all<op::add_Tensor, op::add__Tensor, op::sub_Tensor, op::sub__Tensor, op::mul_Tensor, op::mul__Tensor,
          op::div_Tensor, op::div__Tensor, op::neg, op::abs, op::exp, op::log, op::sqrt, op::rsqrt, op::reciprocal,
          op::pow_Tensor_Scalar, op::where_self, op::addcmul, op::addcdiv, op::maximum, op::minimum>(m);
  add_all<op::eq_Scalar, op::ne_Scalar, op::lt_Scalar, op::le_Scalar, op::gt_Scalar, op::ge_Scalar, op::eq_Tensor,
          op::ne_Tensor, op::lt_Tensor, op::le_Tensor, op::gt_Tensor, op::ge_Tensor, op::bitwise_or_Tensor,
          op::bitwise_and_Tensor, op::fill__Scalar, op::zero_>(m);
  add_all<op::sigmoid, op::sigmoid_backward, op::tanh, op::tanh_backward, op::relu, op::threshold_backward, op::silu,
          op::silu_backward, op::leaky_relu, op::leaky_relu_backward>(m);
  add_all<op::mm, op::addmm, op::bmm, op::dot, op::sum, op::sum_dim_IntList, op::mean, op::mean_dim, op::_softmax,
          op::_softmax_backward_data, op::_log_softmax, op::_log_softmax_backward_data, op::embedding,
          op::embedding_dense_backward, op::index_select, op::select_backward, op::slice_backward,
          op::native_layer_norm, op::convolution>(m);
}

}  // namespace tandem
