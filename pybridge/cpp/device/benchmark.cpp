// The cost of creating a tensor in PyTorch. Benchmarks compare it with the cost of an op.
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <chrono>
#include <cstdint>

#include "boundary/shim.h"
#include "device/storage.h"

extern "C" double ttc_time_torch_objects(int64_t times) {
  using namespace tandem;
  static const int64_t sizes[] = {8, 8}, strides[] = {8, 1};
  TtOut out{};
  out.sizes = sizes, out.strides = strides, out.ndim = 2, out.dtype = static_cast<uint8_t>(c10::ScalarType::Float);
  const auto start = std::chrono::steady_clock::now();
  // The context is null, so the deleter does nothing.
  for (int64_t i = 0; i < times; i++) window(c10::Storage(adopt_storage(nullptr, nullptr, 256, 0)), out);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(times);
}
