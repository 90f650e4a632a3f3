// Functions that PyTorch composes of other operators and that require all tensors on one device. In an adopted program,
// some tensors are on the host although the program names no device: tensors from NumPy or from a file. Operators are
// fed with such tensors, but these functions would raise an error that eager PyTorch does not raise. So the tensors are
// moved before the call.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "aten/host_shortcuts.h"
#include "calls/library.h"
#include "device/device_type.h"

namespace tandem {

namespace {

// tests/python/test_adopted_arguments.py calls all operators with tensors on both devices, and finds functions that are
// missing here.
constexpr const char* kOnOneDevice[] = {"cdist",
                                        "gradient.array",
                                        "gradient.scalararray",
                                        "gradient.scalarint",
                                        "gradient.scalarrayarray",
                                        "gradient.scalarrayint",
                                        "gradient.tensorarray",
                                        "gradient.tensorarrayint",
                                        "inner",
                                        "inner.out",
                                        "istft",
                                        "linalg_multi_dot",
                                        "linalg_multi_dot.out",
                                        "meshgrid",
                                        "meshgrid.indexing",
                                        "nanquantile",
                                        "nanquantile.out",
                                        "quantile",
                                        "quantile.out",
                                        "scaled_dot_product_attention",
                                        "stft",
                                        "stft.center",
                                        "take_along_dim",
                                        "take_along_dim.out"};

bool is_on_host(const at::Tensor& t) { return t.defined() && t.is_cpu(); }

template <class F>
void each_tensor(c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value);
  if (!value.isTensorList()) return;
  auto list = value.toTensorList();
  c10::List<at::Tensor> changed;
  for (const at::Tensor& t : list) {
    c10::IValue item(t);
    f(item);
    changed.push_back(item.toTensor());
  }
  value = std::move(changed);
}

// Moves host tensors among the arguments to the device of the other tensors, and calls the composed kernel. The kernel
// is registered for the host's dispatch keys too, and calls operators that go to their own tensors' devices.
void on_one_device(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& arguments = handle.schema().arguments();
  auto* first = stack->data() + (stack->size() - arguments.size());
  std::optional<c10::Device> device;
  for (size_t i = 0; i < arguments.size(); i++)
    each_tensor(first[i], [&](c10::IValue& t) {
      if (t.toTensor().defined() && t.toTensor().device().type() == kTandem) device = t.toTensor().device();
    });
  for (size_t i = 0; device && i < arguments.size(); i++)
    if (!arguments[i].is_out())
      each_tensor(first[i], [&](c10::IValue& t) {
        if (is_on_host(t.toTensor())) t = t.toTensor().to(*device);
      });
  if (!capture_with_shortcut(handle, stack))
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
}

void move_mixed_arguments() {
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1})
    for (const char* name : kOnOneDevice)
      library(key).impl(name, torch::CppFunction::makeFromBoxedFunction<&on_one_device>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) { m.def("move_mixed_arguments() -> ()", move_mixed_arguments); }

}  // namespace tandem
