// Collectives: calls of torch.distributed's operators (c10d::*) on tandem tensors.
//
// A collective is issued as two operators. tandem::collective_start copies the tensors to send to the host and starts
// the call there; tandem::collective_wait copies the received tensors to the device. The wait is issued before the
// first operator that uses a tensor that is being received, so kernels and Python run in between.
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
  at::Tensor tensor;  // tensor on the device; undefined once the call has been started
  bool is_sent, is_received;
  at::Tensor on_host;  // contiguous copy of the tensor
};

class Collective {
 public:
  // Takes the arguments of a call of `op`. Raises an error for tensors that cannot be sent.
  Collective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  const std::vector<Operand>& operands() const { return operands_; }
  // Name of the operator, dtype and sizes of the tensors, and the user's line.
  const std::string& description() const { return description_; }
  // The ops that the program has issued since the previous collective.
  const std::vector<TtIssued>& before() const { return before_; }
  // Name of the operator: allreduce.
  const std::string& name() const { return name_; }
  // Name of the operator and the user's line.
  const std::string& place() const { return place_; }
  int64_t bytes() const { return bytes_; }
  // A number that differs between ranks that call different operators, or the same operator on tensors that do not fit.
  int64_t fingerprint() const { return fingerprint_; }
  // Whether the call is between two ranks.
  bool is_point_to_point() const { return is_point_to_point_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  // The backend that the group has for the device, which communicates through the host.
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Copies the tensors to send from `sent`, in order, and allocates the other tensors on the host.
  void stage(at::TensorList sent);
  // Starts the call with the tensors on the host. Returns null if the call has already ended.
  c10::intrusive_ptr<c10d::Work> call() const;
  // Notes that this rank cannot make the call. The other ranks have to be told.
  void refuse(std::exception_ptr error);
  // The reason why this rank cannot make the call, or null. It does not change once the call has been enqueued.
  const std::exception_ptr& refusal() const { return refusal_; }
  // Ends the call, with an error unless `error` is null.
  void finish(std::exception_ptr error);
  // Completes an average, which the host's backend does not have: the backend adds, and this function divides.
  void complete() const;

  // Whether the call receives a tensor.
  bool receives() const;
  // Whether the tensors to send have been copied, or the call was refused. The operator that copies them is skipped if
  // a tensor depends on an operator that failed.
  bool is_started() const { return started_.time_since_epoch().count() != 0; }
  bool is_finished() const { return finished_.load(std::memory_order_acquire); }
  // Waits for the end of the call, and throws its error. The error of a refused call is thrown after a short time even
  // if the other ranks have not been told.
  void wait();
  bool ends_within(std::chrono::milliseconds limit);
  std::exception_ptr error() const { return is_finished() ? error_ : nullptr; }
  // The host's work object for a call between two ranks, once the call has been started.
  c10::intrusive_ptr<c10d::Work> work;

 private:
  // The tensors on the host that are sent, or those that are received.
  std::vector<at::Tensor> on_host(bool Operand::* is_wanted) const;

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  std::vector<Operand> operands_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string name_, description_, place_;
  c10d::ReduceOp reduction_;
  // For a call between two ranks, the other rank and the tag.
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

// Makes the host's backend run a collective after all earlier collectives of the same group. First, the ranks compare
// the calls that they are about to make.
void enqueue(const std::shared_ptr<Collective>& collective);
// Throws the error of an earlier collective of this group.
void check_group(const Collective& collective);

// Count a collective, and a wait for a collective, for the report.
void count_collective(const Collective& collective, std::chrono::nanoseconds took);
void count_wait(const Collective& collective, std::chrono::nanoseconds waited);

}  // namespace tandem
