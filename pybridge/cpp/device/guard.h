// The device guard: the calling thread's current device, streams and events.
#pragma once

#include <c10/core/Device.h>

namespace tandem {

// The calling thread's current device.
c10::DeviceIndex current_device();
// Changes the calling thread's current device and returns the previous one. The index -1 stands for the current device.
// Throws if the device does not exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
// Returns the index of a tandem device. If `device` has no index, returns the index of the current device. Throws if
// the device does not exist.
c10::DeviceIndex index_of(c10::Device device);
// Registers a guard for the CUDA device type, so that CUDA becomes an alias of this device.
void register_cuda_guard();

}  // namespace tandem
