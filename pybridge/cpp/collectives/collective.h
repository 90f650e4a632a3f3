// Collectives: calls of torch.distributed's operators (c10d::*) on tandem tensors.
//
// A collective is recorded as two operators. tandem::collective_start copies the tensors that are sent to the host and
// starts the call there; tandem::collective_wait copies what was received to the device. The second one is issued
// before the first operator that uses a tensor that is being received, so kernels and Python run in between.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "boundary/shim.h"

namespace tandem {

// A tensor among the arguments of a collective.
struct Operand {
  at::Tensor tensor;  // on the device; undefined once the call has been started
  bool is_sent, is_received;
  at::Tensor on_host;  // contiguous copy
};

class Collective {
 public:
  // Takes the arguments of a call of `op`. Raises an error for tensors that cannot be sent.
  Collective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  const std::vector<Operand>& operands() const { return operands_; }
  // Name of the operator, dtype and sizes of the tensors, and the user's line.
  const std::string& description() const { return description_; }
  // The ops that the program has issued since the collective before.
  const std::vector<TtIssued>& before() const { return before_; }
  // Name of the operator: allreduce.
  const std::string& name() const { return name_; }
  // Name of the operator and the user's line.
  const std::string& place() const { return place_; }
  int64_t bytes() const { return bytes_; }
  // Number that differs if ranks call different operators, or the same one on tensors that do not fit.
  int64_t fingerprint() const { return fingerprint_; }
  // Whether the call is between two ranks.
  bool is_point_to_point() const { return is_point_to_point_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  // The backend that the group has for the device, which communicates through the host.
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Copies the sent tensors from `sent`, in order, and allocates the host's copies of the others.
  void stage(at::TensorList sent);
  // Starts the call on the host's copies. Returns null if it has ended.
  c10::intrusive_ptr<c10d::Work> call() const;
  // Notes that this rank cannot make the call, which the other ranks have to be told.
  void refuse(std::exception_ptr error);
  // The reason, or null. It does not change once the call has been enqueued.
  const std::exception_ptr& refusal() const { return refusal_; }
  // Ends the call, with an error unless it is null.
  void finish(std::exception_ptr error);
  // Completes a reduction that the host's backend does not have: it adds, and this divides.
  void complete() const;

  // Whether a tensor is received.
  bool receives() const;
  // Whether the tensors that are sent have been copied, or the call was refused. The operator that copies them is skipped
  // if one of them depends on an operator that failed.
  bool is_started() const { return started_.time_since_epoch().count() != 0; }
  bool is_finished() const { return finished_.load(std::memory_order_acquire); }
  // Waits for the end of the call. Throws its error. The error of a refused call is thrown although the other ranks may
  // not have been told.
  void wait();
  bool ends_within(std::chrono::milliseconds limit);
  std::exception_ptr error() const { return is_finished() ? error_ : nullptr; }
  // The host's work of a call between two ranks, once it has been started.
  c10::intrusive_ptr<c10d::Work> work;

 private:
  // The host's copies of what is sent, or received.
  std::vector<at::Tensor> on_host(bool Operand::* is_wanted) const;

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  std::vector<Operand> operands_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string name_, description_, place_;
  c10d::ReduceOp reduction_;
  // The other rank of a call between two, and the tag.
  int64_t peer_ = -1, tag_ = 0;
  std::vector<TtIssued> before_;
  int64_t bytes_ = 0, fingerprint_ = 0;
  std::chrono::milliseconds timeout_{-1};
  bool is_point_to_point_ = false, averages_ = false, by_rows_ = false;
  std::chrono::steady_clock::time_point started_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> finished_{false};
  std::exception_ptr error_, refusal_;
};

// Has the host's backend run a collective after those before it of the same group. The ranks compare what they call
// first.
void enqueue(const std::shared_ptr<Collective>& collective);
// Throws the error of an earlier collective of this group.
void check_group(const Collective& collective);

// Count a collective, and a wait for one, for the report.
void count_collective(const Collective& collective, std::chrono::nanoseconds took);
void count_wait(const Collective& collective, std::chrono::nanoseconds waited);

}  // namespace tandem
