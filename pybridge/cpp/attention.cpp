// scaled_dot_product_attention chooses its kernel by device. Here the device gets the CPU's choice.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>

namespace at::native {

namespace {

// The CPU's choice depends on metadata only, so it can be called with tandem tensors.
template <class... Args>
int64_t choose_as_cpu(Args... args) {
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), args...);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_as_cpu)

}  // namespace at::native
