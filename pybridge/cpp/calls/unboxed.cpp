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
  // Point-wise operators.
  add_all<op::_prelu_kernel, op::abs, op::abs_, op::acos, op::acos_, op::add_Scalar, op::add_Tensor, op::add__Scalar,
          op::add__Tensor, op::addcdiv, op::addcdiv_, op::addcmul, op::addcmul_, op::asin, op::asin_, op::atan,
          op::atan2, op::atan2_, op::atan_, op::bitwise_and_Scalar, op::bitwise_and_Tensor, op::bitwise_and__Scalar,
          op::bitwise_and__Tensor, op::bitwise_not, op::bitwise_not_, op::bitwise_or_Scalar, op::bitwise_or_Tensor,
          op::bitwise_or__Scalar, op::bitwise_or__Tensor, op::bitwise_xor_Scalar, op::bitwise_xor_Tensor,
          op::bitwise_xor__Scalar, op::bitwise_xor__Tensor, op::ceil, op::ceil_, op::clamp, op::clamp_,
          op::clamp_Tensor, op::clamp__Tensor, op::clamp_max, op::clamp_max_, op::clamp_max_Tensor,
          op::clamp_max__Tensor, op::clamp_min, op::clamp_min_, op::clamp_min_Tensor, op::clamp_min__Tensor, op::cos,
          op::cos_, op::cosh, op::cosh_, op::div_Scalar, op::div_Tensor, op::div_Tensor_mode, op::div__Scalar,
          op::div__Tensor, op::div__Tensor_mode, op::elu, op::elu_, op::eq_Scalar, op::eq_Tensor, op::eq__Scalar,
          op::eq__Tensor, op::erf, op::erf_, op::exp, op::exp2, op::exp2_, op::exp_, op::expm1, op::expm1_, op::floor,
          op::floor_, op::floor_divide, op::floor_divide_Scalar, op::floor_divide__Scalar, op::floor_divide__Tensor,
          op::fmax, op::fmin, op::fmod_Scalar, op::fmod_Tensor, op::ge_Scalar, op::ge_Tensor, op::ge__Scalar,
          op::ge__Tensor, op::gelu, op::gelu_, op::glu, op::gt_Scalar, op::gt_Tensor, op::gt__Scalar, op::gt__Tensor,
          op::hardsigmoid, op::hardsigmoid_, op::hardswish, op::hardswish_, op::hardtanh, op::hardtanh_, op::isnan,
          op::le_Scalar, op::le_Tensor, op::le__Scalar, op::le__Tensor, op::leaky_relu, op::leaky_relu_,
          op::lerp_Scalar, op::lerp_Tensor, op::lerp__Scalar, op::lerp__Tensor, op::lgamma, op::lgamma_, op::log,
          op::log10, op::log10_, op::log1p, op::log1p_, op::log2, op::log2_, op::log_, op::log_sigmoid_forward,
          op::logaddexp, op::logical_and, op::logical_and_, op::logical_not, op::logical_not_, op::logical_or,
          op::logical_or_, op::logical_xor, op::logical_xor_, op::lt_Scalar, op::lt_Tensor, op::lt__Scalar,
          op::lt__Tensor, op::masked_fill_Scalar, op::masked_fill_Tensor, op::masked_fill__Scalar,
          op::masked_fill__Tensor, op::maximum, op::minimum, op::mul_Scalar, op::mul_Tensor, op::mul__Scalar,
          op::mul__Tensor, op::nan_to_num, op::nan_to_num_, op::ne_Scalar, op::ne_Tensor, op::ne__Scalar,
          op::ne__Tensor, op::neg, op::neg_, op::pow_Tensor_Scalar, op::pow_Tensor_Tensor, op::pow__Scalar,
          op::pow__Tensor, op::reciprocal, op::reciprocal_, op::relu, op::relu_, op::remainder_Scalar,
          op::remainder_Tensor, op::remainder__Scalar, op::remainder__Tensor, op::round, op::round_,
          op::round__decimals, op::round_decimals, op::rsqrt, op::rsqrt_, op::rsub_Scalar, op::rsub_Tensor, op::sigmoid,
          op::sigmoid_, op::sign, op::sign_, op::silu, op::silu_, op::sin, op::sin_, op::sinh, op::sinh_, op::softplus,
          op::sqrt, op::sqrt_, op::sub_Scalar, op::sub_Tensor, op::sub__Scalar, op::sub__Tensor, op::tan, op::tan_,
          op::tanh, op::tanh_, op::threshold, op::threshold_, op::trunc, op::trunc_, op::where_self>(m);
  // Their gradients.
  add_all<op::_prelu_kernel_backward, op::elu_backward, op::gelu_backward, op::glu_backward, op::hardsigmoid_backward,
          op::hardswish_backward, op::hardtanh_backward, op::leaky_relu_backward, op::log_sigmoid_backward,
          op::sigmoid_backward, op::silu_backward, op::softplus_backward, op::tanh_backward, op::threshold_backward>(m);
  // Fills and random numbers.
  add_all<op::bernoulli, op::bernoulli_Tensor, op::bernoulli__Tensor, op::bernoulli__float, op::exponential_,
          op::fill__Scalar, op::fill__Tensor, op::multinomial, op::native_dropout, op::native_dropout_backward,
          op::normal_, op::random_, op::random__from, op::random__to, op::uniform, op::uniform_, op::zero_>(m);
  // Products and convolutions.
  add_all<op::addmm, op::addmm_, op::addmv, op::addmv_, op::baddbmm, op::baddbmm_, op::bmm, op::convolution,
          op::convolution_backward, op::dot, op::mm, op::mv>(m);
  // Reductions, and what runs along a dimension.
  add_all<op::_is_all_true, op::_is_any_true, op::_log_softmax, op::_log_softmax_backward_data, op::_softmax,
          op::_softmax_backward_data, op::all, op::all_dim, op::all_dims, op::amax, op::amin, op::any, op::any_dim,
          op::any_dims, op::argmax, op::argmin, op::count_nonzero, op::count_nonzero_dim_IntList, op::cummax,
          op::cummin, op::cumprod, op::cumprod_, op::cumsum, op::cumsum_, op::dist, op::linalg_vector_norm,
          op::logsumexp, op::max, op::max_dim, op::mean, op::mean_dim, op::min, op::min_dim, op::norm_Scalar,
          op::norm_ScalarOpt_dim, op::prod, op::prod_dim_int, op::sort, op::sort_stable, op::std_correction, op::sum,
          op::sum_dim_IntList, op::topk, op::var_correction, op::var_mean_correction>(m);
  // Normalization, pooling and resampling.
  add_all<op::_adaptive_avg_pool2d, op::_adaptive_avg_pool2d_backward, op::_native_batch_norm_legit,
          op::_native_batch_norm_legit_no_stats, op::_native_batch_norm_legit_no_training, op::adaptive_max_pool2d,
          op::adaptive_max_pool2d_backward, op::avg_pool2d, op::avg_pool2d_backward, op::max_pool2d_backward,
          op::max_pool2d_with_indices, op::max_pool2d_with_indices_backward, op::native_batch_norm,
          op::native_group_norm, op::native_group_norm_backward, op::native_layer_norm, op::native_layer_norm_backward,
          op::upsample_bilinear2d, op::upsample_bilinear2d_backward, op::upsample_nearest1d,
          op::upsample_nearest1d_backward, op::upsample_nearest2d, op::upsample_nearest2d_backward>(m);
  // Losses.
  add_all<op::_ctc_loss, op::_ctc_loss_backward, op::binary_cross_entropy, op::binary_cross_entropy_backward,
          op::binary_cross_entropy_with_logits, op::mse_loss, op::mse_loss_backward, op::nll_loss2d_backward,
          op::nll_loss2d_forward, op::nll_loss_backward, op::nll_loss_forward, op::smooth_l1_loss,
          op::smooth_l1_loss_backward>(m);
  // Indices.
  add_all<op::_unsafe_index_Tensor, op::diagonal_backward, op::embedding, op::embedding_dense_backward, op::gather,
          op::index_Tensor, op::index_add, op::index_add_, op::index_copy, op::index_copy_, op::index_fill__int_Scalar,
          op::index_fill__int_Tensor, op::index_fill_int_Scalar, op::index_fill_int_Tensor, op::index_put,
          op::index_put_, op::index_select, op::masked_select, op::nonzero, op::scatter__src, op::scatter__value,
          op::scatter_add, op::scatter_add_, op::scatter_reduce_two, op::scatter_src, op::scatter_value,
          op::select_backward, op::slice_backward, op::take, op::unfold_backward>(m);
  // Copies of elements to other places.
  add_all<op::constant_pad_nd, op::diag_embed, op::flip, op::reflection_pad1d, op::reflection_pad1d_backward,
          op::reflection_pad2d, op::reflection_pad2d_backward, op::repeat, op::repeat_interleave_Tensor,
          op::replication_pad1d, op::replication_pad1d_backward, op::replication_pad2d, op::replication_pad2d_backward,
          op::roll, op::tril, op::tril_, op::triu, op::triu_>(m);
}

}  // namespace tandem
