// "cuda" as an alias of this device: factories, guards and moves that name CUDA create tandem tensors.
#include "aten/cuda_alias.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/to_native.h>
#include <torch/library.h>

#include <optional>

#include "aten/sparse.h"
#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/library.h"
#include "calls/operators.h"
#include "device/allocator.h"
#include "device/device_type.h"
#include "device/guard.h"

namespace tandem {

bool is_cuda_alias = false;

namespace {

// Makes host tensors in a forked child. Its parent may have told it to use "cuda", which the child cannot use.
void on_host(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const size_t n = handle.schema().arguments().size();
  for (size_t i = stack->size() - n; i < stack->size(); i++)
    if ((*stack)[i].isDevice()) (*stack)[i] = c10::Device(at::kCPU);
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

template <const char* kName>
void factory(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  static const uint32_t id = declare(handle);
  if (C10_UNLIKELY(tt_is_forked())) return on_host(handle, stack);
  dispatch(id, handle, stack);
  if (fills_new_memory()) at::native::fill_empty_deterministic_(stack->back().toTensor());
}

// `to` returns the tensor itself if it is on the device already, so the alias is resolved before the comparison.
std::optional<c10::Device> resolved(std::optional<c10::Device> device) {
  return device && device->is_cuda() ? c10::Device(kTandem, device->index()) : device;
}

at::Tensor to_layout(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking, bool copy,
                     std::optional<at::MemoryFormat> format) {
  return at::native::to(self, dtype, layout, resolved(device), pin_memory, non_blocking, copy, format);
}

at::Tensor to_device(const at::Tensor& self, at::Device device, at::ScalarType dtype, bool non_blocking, bool copy,
                     std::optional<at::MemoryFormat> format) {
  return at::native::to(self, *resolved(device), dtype, non_blocking, copy, format);
}

void alias_moves() {
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    library(key).impl("to.dtype_layout", to_layout);
    library(key).impl("to.device", to_device);
  }
}

constexpr char kEmpty[] = "empty.memory_format";
constexpr char kEmptyStrided[] = "empty_strided";

}  // namespace

}  // namespace tandem

extern "C" int32_t ttc_enable_cuda_alias() {
  using namespace tandem;
  return or_kept(int32_t{TT_RAISE}, [] {
    is_cuda_alias = true;
    register_cuda_guard();
    auto& cuda = library(c10::DispatchKey::CUDA);
    cuda.impl(kEmpty, torch::CppFunction::makeFromBoxedFunction<&factory<kEmpty>>());
    cuda.impl(kEmptyStrided, torch::CppFunction::makeFromBoxedFunction<&factory<kEmptyStrided>>());
    alias_moves();
    alias_sparse();
    return int32_t{TT_OK};
  });
}
