// "cuda" as an alias of this device: factories, guards and moves that name CUDA create tandem tensors.
#include "aten/cuda_alias.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include "aten/sparse.h"
#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/library.h"
#include "calls/operators.h"
#include "device/allocator.h"
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
    alias_sparse();
    return int32_t{TT_OK};
  });
}
