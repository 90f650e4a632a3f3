// Host memory for the results of kernels: a CPU allocator that uses Tandem's pool while a kernel runs for Tandem, and
// PyTorch's own CPU allocator otherwise.
#include "device/host_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <new>
#include <vector>

#include "boundary/shim.h"

namespace tandem {

namespace {

// Number of live PoolGuards of this thread.
thread_local int pooled = 0;

c10::Allocator* system_allocator() {
  static auto* allocator = c10::GetDefaultCPUAllocator();
  return allocator;
}

// Throws the error of PyTorch's allocator if a test makes this allocation fail.
void check_may_allocate(size_t nbytes) {
  TORCH_CHECK(tt_may_allocate(), "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", nbytes,
              " bytes. Error code 12 (Cannot allocate memory)");
}

// Allocates from PyTorch's own allocator. If the allocation fails, returns the pool's free memory to the system and
// tries again.
template <class Allocate>
auto from_system(Allocate allocate) {
  try {
    return allocate(*system_allocator());
  } catch (const c10::Error&) {
    if (!tt_pool_trim()) throw;
  }
  return allocate(*system_allocator());
}

void give_back(void* block) {
  if (!tt_pool_give(block)) system_allocator()->raw_deleter()(block);
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (pooled > 0) {
      check_may_allocate(nbytes);
      if (void* block = tt_pool_take(nbytes)) return {block, block, &give_back, c10::DeviceType::CPU};
    }
    return from_system([&](c10::Allocator& system) { return system.allocate(nbytes); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

void free_small(void* block) { system_allocator()->raw_deleter()(block); }

// Free storages of at most 4 KiB. Each is kept with its StorageImpl for a later op. The storages are sorted by size in
// units of `kLine` bytes.
class SmallStorages {
 public:
  static constexpr size_t kLine = 64, kLines = 64;

  static size_t lines(size_t nbytes) { return (nbytes + kLine - 1) / kLine; }

  c10::StorageImpl* take(size_t nbytes) {
    auto& free = free_[lines(nbytes)];
    if (free.empty()) return nullptr;
    auto* s = free.back();
    free.pop_back();
    kept_ -= taken_by(nbytes);
    return s;
  }

  bool keep(c10::StorageImpl* s) {
    if (kept_ + taken_by(s->nbytes()) > kMost) return false;
    try {
      free_[lines(s->nbytes())].push_back(s);
    } catch (const std::bad_alloc&) {
      return false;
    }
    kept_ += taken_by(s->nbytes());
    return true;
  }

  ~SmallStorages() {
    for (auto& storages : free_)
      for (auto* s : storages) c10::raw::intrusive_ptr::decref(s);
  }

 private:
  // Maximum number of bytes to keep: about as many as an iteration of small ops saves for its backward pass.
  static constexpr size_t kMost = 4 << 20;

  // Bytes of a storage, including the StorageImpl.
  static size_t taken_by(size_t nbytes) { return lines(nbytes) * kLine + sizeof(c10::StorageImpl); }

  std::array<std::vector<c10::StorageImpl*>, kLines + 1> free_;
  size_t kept_ = 0;
};
thread_local SmallStorages small;

}  // namespace

c10::StorageImpl* take_small(size_t nbytes) {
  if (nbytes == 0 || SmallStorages::lines(nbytes) > SmallStorages::kLines) return nullptr;
  check_may_allocate(nbytes);
  if (auto* s = small.take(nbytes)) {
    s->set_nbytes(nbytes);
    return s;
  }
  const size_t whole = SmallStorages::lines(nbytes) * SmallStorages::kLine;
  auto* block = from_system([&](c10::Allocator& system) { return system.raw_allocate(whole); });
  c10::DataPtr data(block, block, &free_small, c10::DeviceType::CPU);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data),
                                               c10::GetCPUAllocator(), true)
      .release();
}

bool keep_small(c10::StorageImpl* s) {
  if (s->data_ptr().get_deleter() != &free_small || c10::raw::intrusive_ptr::use_count(s) != 1) return false;
  return small.keep(s);
}

PoolGuard::PoolGuard() { pooled++; }
PoolGuard::~PoolGuard() { pooled--; }

void register_host_allocator() {
  static HostAllocator allocator;
  // An allocator that the program has set is kept.
  if (c10::GetCPUAllocator() == system_allocator()) c10::SetCPUAllocator(&allocator);
}

}  // namespace tandem
