#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "values.h"

namespace tandem {

namespace {

thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex exchange_current(c10::DeviceIndex device) {
  return std::exchange(current, index_of(c10::Device(kTandem, device)));
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    return allocate_on(current, n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { check(tt_empty_cache()); }
  // All streams are the same queue.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    TtMemory memory{};
    check(tt_memory(static_cast<uint8_t>(device), &memory));
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    auto& allocated = stats.allocated_bytes[kAll];
    allocated.current = memory.allocated, allocated.peak = memory.peak;
    allocated.allocated = memory.made, allocated.freed = memory.freed;
    stats.active_bytes = stats.requested_bytes = stats.reserved_bytes = stats.allocated_bytes;
    auto& reserved = stats.reserved_bytes[kAll];
    reserved.current += memory.kept;
    reserved.peak = std::max(reserved.peak, reserved.current);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { tt_reset_memory(static_cast<uint8_t>(device), 0); }
  void resetPeakStats(c10::DeviceIndex device) override { tt_reset_memory(static_cast<uint8_t>(device), 1); }
  // The memory of the host. The memory of a graphics device is not known here.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return {static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page, static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page};
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "tandem storages cannot be copied through their addresses; use tensor.clone()");
  }
};

// Allocates pinned memory as ordinary host memory, which is enough because a host tensor is copied when it is fed.
// Keeps the address ranges, so that `is_pinned()` can answer.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    auto* memory = c10::alloc_cpu(n);
    if (n > 0) {
      std::lock_guard<std::mutex> lock(mutex());
      ranges()[reinterpret_cast<uintptr_t>(memory)] = n;
    }
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }

  static bool contains(const void* pointer) {
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto above = ranges().upper_bound(at);
    return above != ranges().begin() && at < std::prev(above)->first + std::prev(above)->second;
  }

 private:
  static void free(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(reinterpret_cast<uintptr_t>(memory));
    }
    c10::free_cpu(memory);
  }
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  // Size by start address. Never destroyed, because tensors may be freed after static objects are destroyed.
  static std::map<uintptr_t, size_t>& ranges() {
    static auto* r = new std::map<uintptr_t, size_t>();
    return *r;
  }
};

// A generator of this device, backed by a CPU generator. Before the state is read or set, it waits for pending draws.
class TandemGenerator final : public c10::GeneratorImpl {
 public:
  explicit TandemGenerator(at::Generator host)
      // The CPU key makes operators on host tensors refuse this generator with PyTorch's own error.
      : GeneratorImpl(c10::Device(kTandem, 0), c10::DispatchKeySet(c10::DispatchKey::CPU)), host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { settled().set_current_seed(seed); }
  // Pickling reads and sets the offset of generators of all devices but the CPU. A Mersenne Twister has none.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "the generator of a tandem device has no offset; use set_state");
  }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return settled().current_seed(); }
  uint64_t seed() override { return settled().seed(); }
  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> lock(settled().mutex_);
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return settled().get_state(); }

 private:
  // Returns the CPU generator after its pending draws.
  c10::GeneratorImpl& settled() const {
    check(tt_wait_random());
    return *host_.unsafeGetGeneratorImpl();
  }
  GeneratorImpl* clone_impl() const override {
    settled();
    return new TandemGenerator(at::Generator(host_.clone()));
  }

  at::Generator host_;
};

const at::Generator& default_generator() {
  static const at::Generator generator =
      at::make_generator<TandemGenerator>(at::detail::getDefaultCPUGenerator());
  return generator;
}

// The time at which an event was recorded. Recording a timed event first waits for all earlier work.
using Event = std::chrono::steady_clock::time_point;

// Guard with a single stream for all devices: GraphRunner runs everything in program order.
template <c10::DeviceType kType>
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override { return c10::Device(kType, exchange_current(d.index())); }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device d) const override { exchange_current(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index_of(d)));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(tt_device_count()); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (flag == c10::EventFlag::BACKEND_DEFAULT) check(tt_synchronize());
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // Waits for all earlier work, so the answer is always true.
  bool queryEvent(void* event) const override {
    if (event) check(tt_synchronize());
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    check(tt_synchronize());
    return true;
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto time = *static_cast<Event*>(to) - *static_cast<Event*>(from);
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void synchronizeStream(const c10::Stream&) const override { check(tt_synchronize()); }
  void synchronizeEvent(void*) const override { check(tt_synchronize()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { check(tt_synchronize()); }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(tt_device_count()); }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchange_current(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchange_current(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? current : exchange_current(d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<TandemGenerator>(at::make_generator<at::CPUGeneratorImpl>());
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator instance;
    return &instance;
  }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::contains(pointer); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* si = storage.unsafeGetStorageImpl();
    check(tt_storage_resize(si->mutable_data_ptr().get_context(), nbytes));
    si->set_nbytes(nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard<kTandem>)

}  // namespace

c10::DeviceIndex current_device() { return current; }

bool fills_new_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

c10::DeviceIndex index_of(c10::Device device) {
  if (!device.has_index()) return current;
  TORCH_CHECK(device.index() == 0 || device.index() < tt_device_count(), "invalid device ordinal: ",
              tt_device_count() == 1 ? "there is one device, " : "TANDEM_DEVICE does not name so many devices, ",
              device.str(), " was asked for");
  return device.index();
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes) {
  void* address = nullptr;
  void* context = tt_storage_new(nbytes, static_cast<uint8_t>(device), &address);
  if (!context) throw_pending();
  return {address, context, &tt_storage_release, c10::Device(kTandem, device)};
}

c10::Allocator* allocator() {
  static Allocator instance;
  return &instance;
}

at::Generator host_generator(const at::Generator& g) {
  if (auto* t = dynamic_cast<TandemGenerator*>(g.unsafeGetGeneratorImpl())) return t->host();
  return g;
}

bool is_ordered(const at::Generator& g) {
  auto* impl = g.unsafeGetGeneratorImpl();
  return dynamic_cast<TandemGenerator*>(impl) || impl == at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
}

void register_hooks() {
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kTandem, allocator());
}

void register_cuda_guard() {
  static Guard<c10::DeviceType::CUDA> guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}

}  // namespace tandem

// A torch.Generator object is a PyObject header followed by an at::Generator. The header has two words in all CPython
// versions that the abi3 build supports.
static at::Generator& generator_of(void* object) {
  return *reinterpret_cast<at::Generator*>(static_cast<char*>(object) + 2 * sizeof(void*));
}

extern "C" int32_t ttc_current_device() { return tandem::current_device(); }

extern "C" void ttc_set_device(int32_t device) { tandem::current = static_cast<c10::DeviceIndex>(device); }

extern "C" int32_t ttc_share_default_generator(void* generator, void* with) {
  auto& source = generator_of(with);
  if (source.unsafeGetGeneratorImpl() != at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl()) return 0;
  generator_of(generator) = source;
  source.set_pyobj(static_cast<PyObject*>(generator));
  return 1;
}
