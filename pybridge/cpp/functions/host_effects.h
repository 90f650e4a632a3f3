// The use that a recorded call makes of host tensors.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "functions/recorded.h"

namespace tandem {

// The use that a call makes of host tensors that it has not made, observed at the dispatcher.
//
// A replay reads such a tensor anew if an operator on the device reads it. But values that the host computes from its
// elements would remain those of the recorded call. An exception are counters, floats that the call only increments by
// one, such as the step counts of optimizers: Python computes with them anew, and a replay increments them.
class HostEffects {
 public:
  // `counters` are the tensors of which it is known that calls increment them.
  explicit HostEffects(at::TensorList counters);
  ~HostEffects();
  HostEffects(const HostEffects&) = delete;
  HostEffects& operator=(const HostEffects&) = delete;

  // Whether the call has made the storage of a host tensor.
  bool has_made(const c10::StorageImpl* storage) const { return made_.count(storage) != 0; }
  // The first effect that a replay would not have; empty if there is none.
  std::string refusal;
  // Whether an operator has returned numbers that may be elements of a host tensor.
  bool reads_values = false;
  // The tensors that are incremented by one. Empty if the call writes other host tensors that it has not made.
  std::vector<const c10::TensorImpl*> incremented() const { return writes_others_ ? Tensors() : incremented_; }
  // Whether a host tensor is a counter.
  bool is_counter(const c10::StorageImpl* storage) const { return counters_.count(storage) != 0; }

  // The storages of a call's inputs. The inputs are not accessible when the call ends.
  struct Inputs final : at::ObserverContext {
    std::vector<const c10::StorageImpl*> storages;
    // Whether the operator's kernel may read the elements of a tensor that the call has not made.
    bool may_read = false;
    // Whether the operator increments counters and nothing else.
    bool counts = false;
    // Whether the operator only calls others, and the number of reads before it.
    bool is_composite = false;
    size_t reads = 0;
  };
  std::unique_ptr<Inputs> before(const at::RecordFunction& call);
  void after(const at::RecordFunction& call, const Inputs& inputs);

 private:
  using Tensors = std::vector<const c10::TensorImpl*>;

  // Returns the tensors that an operator increments by one. Returns nothing for operators that do something else.
  std::optional<c10::List<at::Tensor>> incremented_by(const c10::OperatorHandle& op,
                                                      c10::ArrayRef<const c10::IValue> inputs) const;
  // Notes tensors that are incremented by one. Returns whether all of them are counters.
  bool count(const c10::List<at::Tensor>& tensors);
  void refuse(const at::RecordFunction& call, const char* why) {
    if (refusal.empty()) refusal = std::string(call.name()) + why;
  }

  // Whether a composite operator may have read a host tensor itself, instead of by another operator.
  bool may_read_itself(const at::RecordFunction& call, const Inputs& inputs) const;

  at::CallbackHandle handle_;
  std::unordered_set<const c10::StorageImpl*> counters_;
  Tensors incremented_;
  bool writes_others_ = false;
  // The number of reads by kernels so far, and the latest read of each storage.
  size_t reads_ = 0;
  std::unordered_map<const c10::StorageImpl*, size_t> last_reads_;
  // Storages that the call has made. Weak references keep their addresses from being reused.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> made_;
};

}  // namespace tandem
