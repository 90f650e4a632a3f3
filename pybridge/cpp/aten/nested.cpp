// Errors for nested tensors of the strided layout, which this device does not support. Jagged nested tensors work
// without support: they are Python objects that consist of dense tensors.
#include <torch/library.h>

namespace tandem {

namespace {

void not_nested(const c10::OperatorHandle& handle, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "tandem has no nested tensors of the strided layout, which ",
                              handle.operator_name(),
                              " makes or takes; make them with layout=torch.jagged, or keep them on the CPU");
}

// nn.TransformerEncoder asks whether a padding mask can be converted to a nested tensor. After "no", it uses the mask.
bool mask_left_aligned(const at::Tensor&, const at::Tensor&) { return false; }

}  // namespace

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_nested>());
}

// These operators must raise an error: a partly constructed nested tensor would crash the process in autograd.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"_nested_tensor_from_tensor_list", "_nested_tensor_from_mask", "_nested_from_padded",
        "_nested_from_padded_and_nested_example", "_nested_view_from_buffer", "_nested_view_from_buffer_copy"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&not_nested>());
  m.impl("_nested_tensor_from_mask_left_aligned", mask_left_aligned);
}

}  // namespace tandem
