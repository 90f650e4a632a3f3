#include "collectives/in_flight.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "boundary/errors.h"
#include "boundary/last_exception.h"
#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/encode.h"
#include "calls/function.h"
#include "calls/operators.h"
#include "device/device_type.h"
#include "device/observer.h"
#include "device/settling.h"
#include "device/storage.h"

namespace tandem {

namespace {

using at::Tensor;
using Shared = std::shared_ptr<Collective>;

// Collectives, by the number that is fed to the operators of the collective.
class Numbered {
 public:
  int64_t add(const Shared& collective) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.emplace(++last_, collective);
    return last_;
  }
  // Returns null if the collective has ended and the program has dropped the received tensors.
  Shared find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(number);
    return found == all_.end() ? nullptr : found->second;
  }
  void remove(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(number);
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, Shared> all_;
};
Numbered& numbered() {
  static Numbered n;
  return n;
}

// Another tensor with the same elements, for the collective: a program may give its own tensor other elements meanwhile
// (`parameter.data = shard`).
Tensor same_elements(const Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// A collective that receives tensors, and these tensors, until the program uses them.
struct Receiving {
  Shared collective;
  int64_t number;
  std::vector<Tensor> tensors;

  bool receives(const void* storage) const {
    return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return storage_context(t) == storage; });
  }
  // Whether the collective has ended and the program has dropped its tensors.
  bool is_dropped() const {
    return collective->is_finished() &&
           std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.storage().use_count() == 1; });
  }
};

std::mutex mutex;
std::vector<Receiving> receiving;

template <class Pick>
std::vector<Receiving> take(const Pick& pick) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto rest = std::stable_partition(receiving.begin(), receiving.end(), [&](const auto& r) { return !pick(r); });
  std::vector<Receiving> taken(std::make_move_iterator(rest), std::make_move_iterator(receiving.end()));
  receiving.erase(rest, receiving.end());
  in_flight.store(static_cast<uint32_t>(receiving.size()), std::memory_order_relaxed);
  return taken;
}

struct Operator {
  explicit Operator(const char* name)
      : handle(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")), id(declare(handle)) {}
  void operator()(const std::vector<Tensor>& tensors, int64_t number) const {
    if (is_recording) note_refusal("it calls a collective, or uses what one receives");
    torch::jit::Stack stack{c10::List<Tensor>(tensors), number};
    dispatch(id, handle, &stack);
  }
  c10::OperatorHandle handle;
  uint32_t id;
};

void issue_waits(const std::vector<Receiving>& taken) {
  static const Operator wait("tandem::collective_wait");
  for (const auto& r : taken) wait(r.tensors, r.number);
}

class Waits final : public Settler {
 public:
  Waits() { settler = this; }
  void settle(const Encoder& encoder) override {
    issue_waits(take([&](const Receiving& r) {
      return std::any_of(encoder.inputs().begin(), encoder.inputs().end(), [&](const Tensor* t) {
        return t->defined() && t->device().type() == kTandem && r.receives(storage_context(*t));
      });
    }));
  }
  void settle(const void* storage) override {
    issue_waits(take([&](const Receiving& r) { return r.receives(storage); }));
  }
  void settle_all() override {
    issue_waits(take([](const Receiving&) { return true; }));
  }
};

// The kernels below run where operators are executed: on GraphRunner's thread, or on a thread that waits for
// GraphRunner.

void start_on_host(at::TensorList sent, const at::Scalar& number) {
  const auto collective = numbered().find(number.toLong());
  try {
    collective->stage(sent);
    if (collective->is_point_to_point()) collective->work = collective->call();
  } catch (...) {
    // The operator that waits for the collective raises the error.
    collective->refuse(std::current_exception());
  }
  enqueue(collective);
}

// This operator takes no tensors, so it runs even if the operator that starts the call is skipped.
void check_on_host(at::TensorList, const at::Scalar& number) {
  const auto collective = numbered().find(number.toLong());
  if (collective && !collective->receives()) numbered().remove(number.toLong());
  if (!collective || collective->is_started()) return;
  const auto why = last_exception();
  try {
    C10_THROW_ERROR(DistBackendError, collective->description() +
                                          " was not called, because a tensor that it sends depends on an operator that "
                                          "failed" +
                                          (why.empty() ? "" : ": " + why));
  } catch (...) {
    collective->refuse(std::current_exception());
  }
  enqueue(collective);
}

void wait_on_host(at::TensorList received, const at::Scalar& number) {
  const auto collective = numbered().find(number.toLong());
  numbered().remove(number.toLong());
  collective->wait();
  size_t next = 0;
  for (const auto& operand : collective->operands())
    if (operand.is_received) received[next++].copy_(operand.on_host);
}

}  // namespace

void start(const Shared& collective) {
  static const Operator start("tandem::collective_start"), check_start("tandem::collective_check");
  std::vector<Tensor> sent, received;
  std::vector<const void*> storages;
  for (const auto& operand : collective->operands()) {
    if (operand.is_sent) sent.push_back(operand.tensor);
    if (!operand.is_received) continue;
    received.push_back(same_elements(operand.tensor));
    storages.push_back(storage_context(operand.tensor));
  }
  for (const auto& dropped : take([](const Receiving& r) { return r.is_dropped(); })) numbered().remove(dropped.number);
  issue_waits(take([&](const Receiving& r) {
    return std::any_of(storages.begin(), storages.end(), [&](const void* s) { return r.receives(s); });
  }));
  const auto number = numbered().add(collective);
  start(sent, number);
  check_start({}, number);
  if (!received.empty()) {
    static Waits waits;
    const std::lock_guard<std::mutex> lock(mutex);
    receiving.push_back({collective, number, std::move(received)});
    in_flight.store(static_cast<uint32_t>(receiving.size()), std::memory_order_relaxed);
  }
  // The operator must not wait for the rest of a run, because other ranks wait for this one.
  check(tt_flush());
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("collective_start(Tensor[] sent, Scalar number) -> ()");
  m.def("collective_check(Tensor[] nothing, Scalar number) -> ()");
  m.def("collective_wait(Tensor(a!)[] received, Scalar number) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CompositeExplicitAutograd, m) {
  m.impl("collective_start", start_on_host);
  m.impl("collective_check", check_on_host);
  m.impl("collective_wait", wait_on_host);
}

}  // namespace tandem
