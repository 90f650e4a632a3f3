// Composite operators that check whether a tensor is on the CPU. If it is, quantiles are selected instead of sorted,
// and a pooling without gradients stores no indices. The cpu executor calls such an operator whole, so that PyTorch's
// kernel takes its shortcut.
#include "aten/host_shortcuts.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/operators.h"
#include "device/device_type.h"

namespace tandem {

namespace {

constexpr const char* kWithShortcuts[] = {"max_pool1d", "nanquantile", "nanquantile.scalar", "quantile",
                                          "quantile.scalar"};

bool has_shortcut(const c10::OperatorHandle& handle) {
  const auto& name = handle.operator_name();
  const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  return std::any_of(std::begin(kWithShortcuts), std::end(kWithShortcuts),
                     [&](const char* known) { return full == std::string("aten::") + known; });
}

// Whether the tensor is on the device, is no subclass of another library's, and is not differentiated.
bool is_plain(const at::Tensor& t) {
  return t.device().type() == kTandem && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) &&
         !(at::GradMode::is_enabled() && t.requires_grad()) && !t._fw_grad(/*level=*/0).defined();
}

void compose(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  // The composed kernel is registered for the host's dispatch keys too.
  if (!capture_with_shortcut(handle, stack))
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
}

}  // namespace

bool capture_with_shortcut(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  // Modes of __torch_dispatch__ see the operators that PyTorch composes.
  if (!tt_is_cpu() || !has_shortcut(handle) || c10::impl::dispatch_mode_enabled()) return false;
  const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  const auto is_possible = [](const c10::IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() || is_plain(value.toTensor());
  };
  if (!std::all_of(arguments.begin(), arguments.end(), is_possible)) return false;
  at::AutoDispatchBelowADInplaceOrView guard;
  dispatch(declare(handle), handle, stack);
  return true;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  for (const char* name : kWithShortcuts) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compose>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kWithShortcuts) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compose>());
}

}  // namespace tandem
