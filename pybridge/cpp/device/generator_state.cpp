// States and numbers of CPU generators, for Tandem's own kernels that draw with PyTorch's bits.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/exponential_cpu_dispatch.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "boundary/shim.h"
#include "device/generator.h"

namespace {

// Returns the CPU generator that a generator draws from. Null stands for PyTorch's default CPU generator.
at::Generator generator_of(void* g) {
  if (g == nullptr) return at::detail::getDefaultCPUGenerator();
  return tandem::host_generator(
      at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(static_cast<c10::GeneratorImpl*>(g))));
}

}  // namespace

extern "C" {

uint64_t ttc_random_key(void* g) {
  const auto generator = generator_of(g);
  auto* impl = generator.get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(impl->mutex_);
  return impl->random64();
}
void ttc_generator_state(void* g, uint32_t* words, int32_t* left, uint32_t* next) {
  const auto generator = generator_of(g);
  auto* impl = generator.get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(impl->mutex_);
  const auto state = impl->engine().data();
  std::copy(state.state_.begin(), state.state_.end(), words);
  *left = state.left_;
  *next = state.next_;
}
void ttc_set_generator_state(void* g, const uint32_t* words, int32_t left, uint32_t next) {
  const auto generator = generator_of(g);
  auto* impl = generator.get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(impl->mutex_);
  auto engine = impl->engine();
  auto state = engine.data();
  std::copy(words, words + state.state_.size(), state.state_.begin());
  state.left_ = left;
  state.next_ = next;
  engine.set_data(state);
  impl->set_engine(engine);
}
int32_t ttc_exponential(void* g, float* to, int64_t n) {
  try {
    auto out = at::from_blob(to, {n}, at::kFloat);
    at::cpu::exponential_(out, 1, generator_of(g));
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}
void ttc_generator_retain(void* g) { c10::raw::intrusive_ptr::incref(static_cast<c10::GeneratorImpl*>(g)); }
void ttc_generator_release(void* g) { c10::raw::intrusive_ptr::decref(static_cast<c10::GeneratorImpl*>(g)); }
}
