// Buffers: storages in host memory that Rust owns.
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "device/host_memory.h"

using namespace tandem;

namespace {

c10::StorageImpl* storage(void* p) { return static_cast<c10::StorageImpl*>(p); }

// Creates a storage of uninitialized bytes, whose reference the caller owns.
c10::StorageImpl* new_storage(size_t nbytes) {
  if (auto* small = take_small(nbytes)) return small;
  const PoolGuard pool;
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, c10::GetCPUAllocator(),
                                               true)
      .release();
}

}  // namespace

extern "C" {

void* ttc_buffer_new(uint64_t nbytes) {
  return or_kept(static_cast<void*>(nullptr), [&]() -> void* { return new_storage(nbytes); });
}
void ttc_buffer_retain(void* b) { c10::raw::intrusive_ptr::incref(storage(b)); }
void ttc_buffer_release(void* b) {
  if (!keep_small(storage(b))) c10::raw::intrusive_ptr::decref(storage(b));
}
void* ttc_buffer_data(void* b) { return storage(b)->mutable_data(); }
uint64_t ttc_buffer_nbytes(void* b) { return storage(b)->nbytes(); }

int32_t ttc_buffer_is_shared(void* b) { return c10::raw::intrusive_ptr::use_count(storage(b)) > 1; }

int32_t ttc_buffer_resize(void* b, uint64_t nbytes) {
  return or_kept(int32_t{TT_RAISE}, [&] {
    const PoolGuard pool;
    auto* s = storage(b);
    auto allocated = c10::GetCPUAllocator()->allocate(nbytes);
    if (const auto keep = std::min<size_t>(nbytes, s->nbytes())) std::memcpy(allocated.mutable_get(), s->data(), keep);
    s->set_data_ptr_noswap(std::move(allocated));
    s->set_nbytes(nbytes);
    return int32_t{TT_OK};
  });
}

void* ttc_snapshot(const TtTensor* t) {
  const auto item = c10::elementSize(static_cast<c10::ScalarType>(t->dtype));
  int64_t last = 0;
  bool empty = false;
  for (uint32_t i = 0; i < t->ndim; i++) {
    empty |= t->sizes[i] == 0;
    last += (t->sizes[i] - 1) * t->strides[i];
  }
  const size_t nbytes = empty ? 0 : (last + 1) * item;
  void* copy = ttc_buffer_new(nbytes);
  if (copy && nbytes)
    std::memcpy(ttc_buffer_data(copy), static_cast<const char*>(storage(t->storage)->data()) + t->offset * item,
                nbytes);
  return copy;
}
}
