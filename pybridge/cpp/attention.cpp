// scaled_dot_product_attention chooses its kernel by device; for this device, as it does for the CPU.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>

namespace at::native {

namespace {

// The CPU's choice looks at metadata only.
template <class... Args>
int64_t choose_as_cpu(Args... args) {
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), args...);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_as_cpu)

}  // namespace at::native
