// Operators that only change a tensor's window or its storage. They only change metadata, and are never nodes of the
// graph.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <torch/library.h>

#include "boundary/shim.h"
#include "calls/function.h"
#include "device/allocator.h"
#include "device/device_type.h"
#include "device/guard.h"
#include "device/storage.h"

namespace tandem {

namespace {

at::Tensor window_of(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
                                                    self.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return r;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one dimension spans "
              "across two contiguous subspaces). Use .reshape(...) instead.");
  return window_of(self, inferred, *strides, self.storage_offset());
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  if (C10_UNLIKELY(is_recording) && offset) note_offset(self);
  auto r = window_of(self, self.sizes(), self.strides(), self.storage_offset());
  at::native::setStrided(r, size, stride, offset.value_or(self.storage_offset()));
  return r;
}

void grow_storage(const at::Tensor& t) {
  const auto need = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  auto* si = t.storage().unsafeGetStorageImpl();
  if (t.numel() == 0 || need <= si->nbytes()) return;
  resize_storage(*si, storage_context(t), need);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  for (const auto n : size) TORCH_CHECK(n >= 0, "Trying to create tensor with negative dimension ", n, ": ", size);
  // As in PyTorch, the strides do not change if the sizes do not.
  const auto before = static_cast<int64_t>(self.storage().nbytes());
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  grow_storage(self);
  if (fills_new_memory()) at::native::fill_resize_deterministic_(self, before);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kTandem, "Expected a tandem storage in set_, got one on ", source.device());
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data() || size.empty()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {n}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, allocate_on(index_of(self.device()), 0), allocator(), true);
  return set_storage_offset(self, std::move(empty), 0, {0}, {});
}

// Returning true lets `.to()` and `.data =` replace a parameter's TensorImpl, so that it stays the same Python object.
bool compatible_shallow_copy(const at::Tensor&, const at::Tensor&) { return true; }

// Clones at once instead of lazily. PyTorch's copy-on-write shares memory by its address, and a tandem storage's
// address has no memory.
at::Tensor lazy_clone(const at::Tensor& self) { return self.clone(); }

// Creates a zero tensor without memory, for forward-mode gradients. PyTorch skips arithmetic with such tensors.
at::Tensor efficient_zeros(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  at::native::ZeroTensorAllocator nothing(at::Device(kTandem, index));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &nothing,
                                   kTandemKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   at::dtype_or_default(dtype), std::nullopt);
}

// Does nothing, because all streams are the same queue.
void record_stream(at::Tensor&, at::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("_lazy_clone", lazy_clone);
  m.impl("record_stream", record_stream);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
}

}  // namespace tandem
