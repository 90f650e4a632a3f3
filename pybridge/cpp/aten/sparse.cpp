// Sparse tensors of this device: PyTorch's objects, whose indices and values are dense tandem tensors.
//
// Operators that only rearrange indices and values call other operators, so PyTorch's kernels for the host work here
// too. All other operators run on the host: their operands are copied to the host, and their results back. Quantized
// tensors are refused.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "aten/sparse.h"
#include "calls/call.h"
#include "calls/function.h"
#include "calls/host_gradients.h"
#include "calls/library.h"
#include "calls/operators.h"
#include "device/device_type.h"
#include "device/observer.h"

namespace tandem {

namespace {

using c10::DispatchKey;

// Operators on COO tensors that only read or replace indices, values and sizes.
constexpr const char* kParts[] = {"_coalesced_",
                                  "_dimI",
                                  "_dimV",
                                  "_indices",
                                  "_nnz",
                                  "_sparse_coo_tensor_with_dims",
                                  "_sparse_coo_tensor_with_dims_and_tensors",
                                  "_values",
                                  "clone",
                                  "copy_",
                                  "copy_sparse_to_sparse_",
                                  "dense_dim",
                                  "empty.memory_format",
                                  "empty_like",
                                  "indices",
                                  "is_coalesced",
                                  "is_pinned",
                                  "permute",
                                  "resize_as_sparse_",
                                  "sparse_dim",
                                  "sparse_resize_",
                                  "sparse_resize_and_clear_",
                                  "unsqueeze",
                                  "values",
                                  "zero_"};

// Operators on sparse tensors with the layouts CSR, CSC, BSR and BSC that only read or replace these parts and sizes.
constexpr const char* kCompressedParts[] = {"_nnz",       "ccol_indices", "clone",       "col_indices",
                                            "copy_",      "crow_indices", "dense_dim",   "empty.memory_format",
                                            "empty_like", "is_pinned",    "row_indices", "sparse_dim",
                                            "values"};

bool is_on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kTandem; }

// Replaces each tensor in a value by the result of `f`.
template <class F>
c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorList()) list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return value;
}

bool is_dense(const at::Tensor& t) { return t.layout() == c10::Layout::Strided; }

// Copies the contents of a tensor that an operator has written on the host back to the tensor on the device.
void write_back(const at::Tensor& to, const at::Tensor& host) {
  if (is_dense(to) && to.sizes() != host.sizes()) to.resize_(host.sizes());
  to.copy_(host);
}

// Notes that the recorded call of a function cannot be replayed.
void note_sparse() {
  if (C10_UNLIKELY(is_recording))
    note_refusal("it uses sparse tensors, whose operators run on the host. Call them outside of the function");
}

void on_host(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  note_sparse();
  const auto& schema = handle.schema();
  const size_t n = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  std::optional<c10::Device> device;
  std::vector<c10::IValue> hosts;
  for (const auto& value : given)
    hosts.push_back(mapped(value, [&](const at::Tensor& t) {
      if (!is_on_device(t)) return t;
      device = t.device();
      // The copy must require grad as the tensor does, because some kernels return more if a gradient is wanted.
      auto host = t.to(at::kCPU);
      return t.requires_grad() ? host.set_requires_grad(true) : host;
    }));
  for (size_t i = 0; device && i < n; i++)
    if (given[i].isTensor()) {
      const auto& t = given[i].toTensor();
      if (t.defined() && t.is_cpu() && is_dense(t) && t.requires_grad()) accept_device_gradient(t, device->index());
    }
  stack->resize(stack->size() - n);
  for (const auto& value : hosts) stack->push_back(value);
  handle.callBoxed(stack);
  for (size_t i = 0; i < n; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && given[i].isTensor() && is_on_device(given[i].toTensor()))
      write_back(given[i].toTensor(), hosts[i].toTensor());
  }
  const size_t first = stack->size() - schema.returns().size();
  for (size_t r = first; r < stack->size(); r++)
    (*stack)[r] = mapped((*stack)[r], [&](const at::Tensor& t) {
      for (size_t i = 0; i < n; i++)
        if (hosts[i].isTensor() && hosts[i].toTensor().is_same(t)) return given[i].toTensor();
      return device ? t.to(*device) : t;
    });
}

// Calls the host's kernel directly with tensors of this device.
template <DispatchKey kHost>
void as_host_kernel(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  note_sparse();
  handle.redispatchBoxed(c10::DispatchKeySet(kHost), stack);
}

template <DispatchKey kHost, size_t kN>
void implement(DispatchKey key, const c10::OperatorHandle& op, const char* const (&parts)[kN]) {
  if (!op.hasKernelForDispatchKey(kHost)) return;
  const auto name = full_name(op.operator_name()).substr(6);
  for (const char* part : parts)
    if (name == part)
      return void(library(key).impl(part, torch::CppFunction::makeFromBoxedFunction<&as_host_kernel<kHost>>()));
  library(key).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// Makes a tensor on this device for a call that names CUDA.
template <DispatchKey kThen>
void as_named(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const size_t n = handle.schema().arguments().size();
  for (size_t i = stack->size() - n; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(kTandem, value.toDevice().index());
  }
  handle.redispatchBoxed(c10::DispatchKeySet(kThen), stack);
}

// The gradient of the embeddings in embedding bags. If it is asked for, PyTorch's kernel returns a sparse tensor.
void embedding_bag_backward(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  static const uint32_t id = declare(handle);
  const size_t n = handle.schema().arguments().size();
  const auto sparse = *handle.schema().argumentIndexWithName("sparse");
  if ((*stack)[stack->size() - n + sparse].toBool()) return on_host(handle, stack);
  dispatch(id, handle, stack);
}

void not_quantized(const c10::OperatorHandle& handle, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "tandem has no quantized tensors, and ", handle.operator_name(),
                              " makes or takes one. Keep that tensor on the CPU, or call .dequantize() first");
}

}  // namespace

void implement_sparse(const c10::OperatorHandle& op) {
  implement<DispatchKey::SparseCPU>(DispatchKey::SparsePrivateUse1, op, kParts);
  implement<DispatchKey::SparseCsrCPU>(DispatchKey::SparseCsrPrivateUse1, op, kCompressedParts);
}

void alias_sparse() {
  auto& coo = library(DispatchKey::SparseCUDA);
  for (const char* name :
       {"empty.memory_format", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"})
    coo.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_named<DispatchKey::SparseCPU>>());
  library(DispatchKey::SparseCsrCUDA)
      .impl("empty.memory_format", torch::CppFunction::makeFromBoxedFunction<&as_named<DispatchKey::SparseCsrCPU>>());
  // These operators have one kernel for all devices.
  for (const char* name : {"_sparse_bsc_tensor_unsafe", "_sparse_bsr_tensor_unsafe", "_sparse_compressed_tensor_unsafe",
                           "_sparse_csc_tensor_unsafe", "_sparse_csr_tensor_unsafe", "_to_copy", "zeros"})
    library(DispatchKey::SparseCsrCUDA)
        .impl(name, torch::CppFunction::makeFromBoxedFunction<&as_named<DispatchKey::SparseCsrMeta>>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_quantized>());
}

// Operators that make sparse tensors from dense tensors.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"_spdiags", "_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_bsc", "_to_sparse_bsr",
                           "_to_sparse_csc", "_to_sparse_csr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  m.impl("_embedding_bag_backward", torch::CppFunction::makeFromBoxedFunction<&embedding_bag_backward>());
}

}  // namespace tandem
