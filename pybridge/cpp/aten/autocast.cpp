// Registrations for torch.autocast("tandem"), from PyTorch's own lists of operators.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <tuple>

namespace at::autocast {

namespace {

Tensor binary_cross_entropy_banned(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
              "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe to autocast.");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TANDEM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(TANDEM_LOWER)
#undef TANDEM_LOWER
#define TANDEM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(TANDEM_FP32)
#undef TANDEM_FP32
#define TANDEM_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TANDEM_SET_DTYPE)
#undef TANDEM_SET_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define TANDEM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(TANDEM_PROMOTE)
#undef TANDEM_PROMOTE
  m.impl(TORCH_SELECTIVE_NAME("aten::cat"),
         &WrapFunction<CastPolicy::promote, DeviceType::PrivateUse1, Tensor(const ITensorListRef&, int64_t),
                       Tensor(const ITensorListRef&, int64_t), &ADD_NS(cat)>::type::call);
  m.impl(TORCH_SELECTIVE_NAME("aten::stack"),
         &WrapFunction<CastPolicy::promote, DeviceType::PrivateUse1, Tensor(TensorList, int64_t),
                       Tensor(TensorList, int64_t), &ADD_NS(stack)>::type::call);
  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), &binary_cross_entropy_banned);
}

}  // namespace at::autocast
