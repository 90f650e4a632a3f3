#include "device/guard.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

#include "boundary/shim.h"
#include "device/device_type.h"
#include "device/settling.h"

namespace tandem {

namespace {

thread_local c10::DeviceIndex current = 0;

// The time at which an event was recorded. To record a timed event, the program first waits for all earlier work.
using Event = std::chrono::steady_clock::time_point;

// Guard with a single stream for all devices, because GraphRunner runs everything in program order.
template <c10::DeviceType kType>
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override { return c10::Device(kType, exchange_device(d.index())); }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
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
  // The dtypes that convert to each other. An operator without a kernel for a dtype runs on the host.
  c10::DeviceCapability getDeviceCapability(c10::Device d) const override {
    index_of(d);
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    auto& types = capability.capability_data.supported_scalar_types;
    types.has_Bool = types.has_Byte = types.has_UInt16 = types.has_UInt32 = types.has_UInt64 = 1;
    types.has_Char = types.has_Short = types.has_Int = types.has_Long = 1;
    types.has_Half = types.has_BFloat16 = types.has_Float = types.has_Double = 1;
    types.has_ComplexHalf = types.has_ComplexFloat = types.has_ComplexDouble = 1;
    types.has_Float8_e5m2 = types.has_Float8_e4m3fn = types.has_Float8_e5m2fnuz = types.has_Float8_e4m3fnuz = 1;
    types.has_Float8_e8m0fnu = 1;
    return capability;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (flag == c10::EventFlag::BACKEND_DEFAULT) synchronize();
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // Waits for all earlier work, so the answer is always true.
  bool queryEvent(void* event) const override {
    if (event) synchronize();
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    synchronize();
    return true;
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto time = *static_cast<Event*>(to) - *static_cast<Event*>(from);
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeEvent(void*) const override { synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard<kTandem>)

}  // namespace

c10::DeviceIndex current_device() { return current; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  return std::exchange(current, index_of(c10::Device(kTandem, device)));
}

c10::DeviceIndex index_of(c10::Device device) {
  if (!device.has_index()) return current;
  TORCH_CHECK(device.index() == 0 || device.index() < tt_device_count(), "invalid device ordinal: ",
              tt_device_count() == 1 ? "there is one device, " : "TANDEM_DEVICE does not name so many devices, ",
              device.str(), " was asked for");
  return device.index();
}

void register_cuda_guard() {
  static Guard<c10::DeviceType::CUDA> guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}

}  // namespace tandem

extern "C" int32_t ttc_current_device() { return tandem::current_device(); }

extern "C" void ttc_set_device(int32_t device) { tandem::current = static_cast<c10::DeviceIndex>(device); }
