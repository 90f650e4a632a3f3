#include "device/allocator.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "device/device_type.h"
#include "device/guard.h"

namespace tandem {

namespace {

uint8_t existing(c10::DeviceIndex device) { return static_cast<uint8_t>(index_of(c10::Device(kTandem, device))); }

c10::CachingAllocator::Stat stat(const TtAmount& amount) {
  c10::CachingAllocator::Stat stat;
  stat.current = amount.live, stat.peak = amount.peak;
  stat.allocated = amount.created, stat.freed = amount.freed;
  return stat;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override { return allocate_on(current_device(), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { check(tt_empty_cache()); }
  // Does nothing, because all streams are the same queue.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    TtMemory memory{};
    check(tt_memory(existing(device), &memory));
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[kAll] = stat(memory.bytes);
    stats.active_bytes = stats.requested_bytes = stats.reserved_bytes = stats.allocated_bytes;
    // Each storage counts as a segment with a single block.
    stats.allocation[kAll] = stat(memory.storages);
    stats.active = stats.segment = stats.allocation;
    stats.num_device_alloc = memory.storages.created, stats.num_device_free = memory.storages.freed;
    auto& reserved = stats.reserved_bytes[kAll];
    reserved.current += memory.kept;
    reserved.peak = std::max(reserved.peak, reserved.current);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { tt_reset_memory(existing(device), 0); }
  void resetPeakStats(c10::DeviceIndex device) override { tt_reset_memory(existing(device), 1); }
  // The memory of the host, because the memory of a graphics device is not known here.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    existing(device);
    const TtHostMemory memory = tt_host_memory();
    return {memory.free, memory.total};
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "tandem storages cannot be copied through their addresses; use tensor.clone()");
  }
};

}  // namespace

c10::Allocator* allocator() {
  static Allocator instance;
  return &instance;
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes) {
  void* address = nullptr;
  void* context = tt_storage_new(nbytes, static_cast<uint8_t>(device), &address);
  if (!context) throw_pending();
  return {address, context, tt_storage_release, c10::Device(kTandem, device)};
}

bool fills_new_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

void register_allocator() { c10::SetAllocator(kTandem, allocator()); }

}  // namespace tandem
