// The check of as_strided_scatter, whose gradient PyTorch computes only for contiguous tensors. PyTorch's kernel makes
// the check too, but a captured call reaches the kernel without its autograd state.
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "calls/call.h"
#include "calls/operators.h"

namespace tandem {

namespace {

void as_strided_scatter(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  static const uint32_t op = declare(handle);
  const auto& self = torch::jit::peek(*stack, 0, handle.schema().arguments().size()).toTensor();
  TORCH_CHECK(!self.requires_grad() || self.is_contiguous(),
              "as_strided_scatter has no gradient for a tensor that is not contiguous; pass tensor.contiguous()");
  dispatch(op, handle, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided_scatter", torch::CppFunction::makeFromBoxedFunction<&as_strided_scatter>());
}

}  // namespace tandem
