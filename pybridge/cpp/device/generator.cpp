#include "device/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "device/device_type.h"

namespace tandem {

namespace {

// A generator of this device, backed by a CPU generator. It waits for pending draws before its state is read or set.
class TandemGenerator final : public c10::GeneratorImpl {
 public:
  explicit TandemGenerator(at::Generator host)
      // The CPU key makes operators on host tensors refuse this generator with PyTorch's own error.
      : GeneratorImpl(c10::Device(kTandem, 0), c10::DispatchKeySet(c10::DispatchKey::CPU)), host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { settled().set_current_seed(seed); }
  // Pickling reads and sets the offset of generators of all devices but the CPU. A Mersenne Twister has no offset.
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
  // Returns the CPU generator after waiting for pending draws.
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

}  // namespace

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<TandemGenerator>(at::detail::getDefaultCPUGenerator());
  return generator;
}

at::Generator new_generator() {
  return at::make_generator<TandemGenerator>(at::make_generator<at::CPUGeneratorImpl>());
}

at::Generator host_generator(const at::Generator& g) {
  if (auto* t = dynamic_cast<TandemGenerator*>(g.unsafeGetGeneratorImpl())) return t->host();
  return g;
}

bool is_ordered(const at::Generator& g) {
  auto* impl = g.unsafeGetGeneratorImpl();
  return dynamic_cast<TandemGenerator*>(impl) || impl == at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
}

}  // namespace tandem

// A torch.Generator object is a PyObject header followed by an at::Generator. The header has two words in all CPython
// versions that the abi3 build supports.
static at::Generator& generator_of(void* object) {
  return *reinterpret_cast<at::Generator*>(static_cast<char*>(object) + 2 * sizeof(void*));
}

extern "C" int32_t ttc_share_default_generator(void* generator, void* with) {
  auto& source = generator_of(with);
  if (source.unsafeGetGeneratorImpl() != at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl()) return 0;
  generator_of(generator) = source;
  source.set_pyobj(static_cast<PyObject*>(generator));
  return 1;
}
