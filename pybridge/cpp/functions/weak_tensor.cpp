#include "functions/weak_tensor.h"

#include <torch/library.h>

#include <mutex>
#include <unordered_set>

namespace tandem {

namespace {

std::mutex mutex;

}  // namespace

struct WeakTensor::Reference {
  explicit Reference(const at::Tensor& t) : weak(t.getIntrusivePtr()) {
    const std::lock_guard<std::mutex> lock(mutex);
    all().insert(this);
  }
  ~Reference() {
    const std::lock_guard<std::mutex> lock(mutex);
    all().erase(this);
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  // The set lives until the process ends, as references may.
  static std::unordered_set<Reference*>& all() {
    static auto* const references = new std::unordered_set<Reference*>();
    return *references;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak;
};

WeakTensor::WeakTensor(const at::Tensor& t) : reference_(std::make_shared<Reference>(t)) {}

c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> WeakTensor::lock() const {
  return reference_->weak.lock();
}

bool WeakTensor::expired() const { return reference_->weak.expired(); }

bool WeakTensor::operator==(const WeakTensor& other) const { return reference_->weak == other.reference_->weak; }

void WeakTensor::clear_all() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto* reference : Reference::all()) reference->weak.reset();
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) { m.def("clear_weak_tensors() -> ()", WeakTensor::clear_all); }

}  // namespace tandem
