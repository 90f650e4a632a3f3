// The use that a recorded call makes of host tensors.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "functions/recorded.h"

namespace tandem {

// The use that a call makes of host tensors that it has not made, observed at the dispatcher.
//
// A replay reads such a tensor anew if an operator on the device reads it. But values that the host computes from its
// elements would remain those of the recorded call.
class HostEffects {
 public:
  HostEffects();
  ~HostEffects();
  HostEffects(const HostEffects&) = delete;
  HostEffects& operator=(const HostEffects&) = delete;

  // Whether the call has made the storage of a host tensor.
  bool has_made(const c10::StorageImpl* storage) const { return made_.count(storage) != 0; }
  // The first effect that a replay would not have; empty if there is none.
  std::string refusal;
  // Whether an operator has returned numbers that may be elements of a host tensor.
  bool reads_values = false;

  // The storages of a call's inputs. The inputs are not accessible when the call ends.
  struct Inputs final : at::ObserverContext {
    std::vector<const c10::StorageImpl*> storages;
    // Whether the operator's kernel may read the elements of a tensor that the call has not made.
    bool may_read = false;
    // Whether the operator only calls others, and the number of reads before it.
    bool is_composite = false;
    size_t reads = 0;
  };
  std::unique_ptr<Inputs> before(const at::RecordFunction& call);
  void after(const at::RecordFunction& call, const Inputs& inputs);

 private:
  void refuse(const at::RecordFunction& call, const char* why) {
    if (refusal.empty()) refusal = std::string(call.name()) + why;
  }

  // Whether a composite operator may have read a host tensor itself, instead of by another operator.
  bool may_read_itself(const at::RecordFunction& call, const Inputs& inputs) const;

  at::CallbackHandle handle_;
  // The number of reads by kernels so far, and the latest read of each storage.
  size_t reads_ = 0;
  std::unordered_map<const c10::StorageImpl*, size_t> last_reads_;
  // Storages that the call has made. Weak references keep their addresses from being reused.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> made_;
};

}  // namespace tandem
