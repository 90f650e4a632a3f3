// Output fetching: fast paths for `.item()` and for copies to the CPU. They avoid boxed arguments (see unboxed.h), and
// the operators of which PyTorch composes these functions.
#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_to_copy_native.h>
#include <torch/library.h>

#include "calls/call.h"
#include "calls/encode.h"
#include "calls/execute.h"
#include "calls/function.h"
#include "calls/operators.h"

namespace tandem {

namespace {

uint32_t id_of(const char* name) { return declare(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")); }

// Whether `local_scalar_dense` can read an element of this dtype directly.
bool is_usual(c10::ScalarType type) {
  return type <= c10::ScalarType::Double || type == c10::ScalarType::Bool || type == c10::ScalarType::BFloat16;
}

at::Scalar read_scalar(const at::Tensor& self) {
  static const uint32_t id = id_of("aten::_local_scalar_dense");
  Lease encoder;
  encoder->begin(1, 1);
  encoder->add(self);
  const auto type = self.scalar_type();
  alignas(16) char element[16];
  if (!fetch(id, *encoder, element, is_usual(type) ? self.itemsize() : 0)) return host_values().front().toScalar();
  at::Scalar value;
  AT_DISPATCH_ALL_TYPES_AND3(c10::kHalf, c10::kBFloat16, c10::kBool, type, "item",
                             [&] { value = *reinterpret_cast<const scalar_t*>(element); });
  return value;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const auto value = read_scalar(self);
  if (C10_UNLIKELY(is_recording)) note_read(self, value);
  return value;
}

at::Tensor to_copy(const at::Tensor& self, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                   std::optional<c10::Device> device, std::optional<bool> pin, bool non_blocking,
                   std::optional<c10::MemoryFormat> format) {
  const bool plain = device && device->is_cpu() && dtype.value_or(self.scalar_type()) == self.scalar_type() &&
                     layout.value_or(c10::kStrided) == c10::kStrided && !pin.value_or(false) &&
                     format.value_or(c10::MemoryFormat::Preserve) == c10::MemoryFormat::Preserve &&
                     self.is_contiguous() && self.numel() > 0 && !self.is_conj() && !self.is_neg();
  if (!plain) return at::native::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
  static const uint32_t id = id_of("aten::copy_");
  // The tensor is created with strides, so that the strides of dimensions of size 1 are preserved.
  const at::Tensor to = at::detail::empty_strided_cpu(self.sizes(), self.strides(), self.scalar_type());
  // The result of fetch() is ignored: if fetch() returns false, the op copy_ has written `to`, which is its first
  // argument.
  Lease encoder;
  encoder->begin(3, 2);
  encoder->add(to);
  encoder->add(self);
  encoder->add(non_blocking);
  fetch(id, *encoder, to.mutable_data_ptr(), to.nbytes());
  return to;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_to_copy", to_copy);
}

}  // namespace tandem
