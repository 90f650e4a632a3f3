// Errors for sparse and quantized tensors, which this device does not support.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace tandem {

namespace {

void not_supported(const c10::OperatorHandle& handle, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "tandem supports dense tensors only: ", handle.operator_name(),
      " makes or takes a sparse or quantized one. Keep that tensor on the CPU, or call .to_dense() or "
      ".dequantize() first");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>());
}

}  // namespace tandem
