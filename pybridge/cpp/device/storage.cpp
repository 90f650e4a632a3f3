#include "device/storage.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>

#include "boundary/errors.h"
#include "device/allocator.h"
#include "device/device_type.h"
#include "device/guard.h"
#include "device/observer.h"
#include "device/settling.h"

namespace tandem {

void* storage_context(const at::Tensor& t) {
  auto* si = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  // A mode may hide a transform's tensor from the transform; such a tensor has no storage.
  TORCH_CHECK(C10_LIKELY(si), "Cannot access data pointer of Tensor that doesn't have storage");
  void* context = si->mutable_data_ptr().get_context();
  if (C10_LIKELY(context != nullptr)) {
    // A slice of an untyped storage has the other storage as its context, and another deleter.
    TORCH_CHECK_NOT_IMPLEMENTED(
        C10_LIKELY(si->data_ptr().get_deleter() == tt_storage_release),
        "tandem does not support tensors on a part of an untyped storage; take a part of the tensor instead, or copy "
        "the storage to the CPU first: storage.cpu()");
  } else if (si->data() != nullptr) {
    // Pickling makes a tensor from a storage's address, without ownership and without a context.
    context = tt_storage_at(si->mutable_data());
    TORCH_CHECK(context != nullptr, "a tandem tensor has the address ", si->data(), ", where no tandem storage is");
  } else {
    // PyTorch created the storage without memory: an untyped storage of zero bytes, a moved-from storage, or the
    // storage of an `_efficientzerotensor`.
    auto allocated = allocate_on(index_of(t.device()), si->nbytes());
    context = allocated.get_context();
    si->set_data_ptr_noswap(std::move(allocated));
    if (t._is_zerotensor()) {
      const int64_t size = static_cast<int64_t>(si->nbytes()), stride = 1;
      TtOut bytes{};
      bytes.sizes = &size, bytes.strides = &stride, bytes.ndim = 1, bytes.dtype = static_cast<uint8_t>(at::kByte);
      window(t.storage(), bytes).zero_();
    }
  }
  return context;
}

void resize_storage(c10::StorageImpl& storage, void* context, size_t nbytes) {
  if (C10_UNLIKELY(in_flight.load(std::memory_order_relaxed) != 0)) settler->settle(context);
  check(tt_storage_resize(context, nbytes));
  storage.set_nbytes(nbytes);
}

c10::intrusive_ptr<c10::StorageImpl> adopt_storage(void* context, void* address, size_t nbytes,
                                                   c10::DeviceIndex device) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes,
      c10::DataPtr(address, context, tt_storage_release, c10::Device(kTandem, device)), allocator(),
      /*resizable=*/true);
  if (C10_UNLIKELY(observer != nullptr) && tt_is_program()) observer->made(storage);
  return storage;
}

at::Tensor window(c10::Storage storage, const TtOut& out) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kTandemKeys,
                                                    c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(out.dtype)));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(out.sizes, out.ndim),
                                                 c10::IntArrayRef(out.strides, out.ndim), out.offset);
  if (out.flags & TT_CONJ) t._set_conj(true);
  if (out.flags & TT_NEG) t._set_neg(true);
  return t;
}

at::Tensor bytes_of(c10::Storage storage) {
  const int64_t size = static_cast<int64_t>(storage.nbytes()), stride = 1;
  TtOut out{};
  out.sizes = &size, out.strides = &stride, out.ndim = 1, out.dtype = static_cast<uint8_t>(at::kByte);
  return window(std::move(storage), out);
}

}  // namespace tandem
