#include "collectives/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aten/cuda_alias.h"
#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/operators.h"
#include "collectives/collective.h"
#include "collectives/in_flight.h"
#include "device/device_type.h"
#include "device/observer.h"

namespace tandem {

namespace {

// Work that does not block Python: operators that use a received tensor wait for it. Only a barrier, a wait with a
// timeout, and a query of the rank that a message came from block.
class Work final : public c10d::Work {
 public:
  Work(std::shared_ptr<Collective> collective, bool blocks)
      : c10d::Work(-1, c10d::OpType::UNKNOWN, title(*collective), inputs(*collective)),
        collective_(std::move(collective)),
        blocks_(blocks) {
    for (const auto& operand : collective_->operands())
      if (operand.is_received) received_.push_back(operand.tensor);
  }

  bool isCompleted() override { return collective_->is_finished(); }
  bool isSuccess() const override { return collective_->is_finished() && !collective_->error(); }
  std::exception_ptr exception() const override { return collective_->error(); }
  std::vector<at::Tensor> result() override { return received_; }
  void synchronize() override {}
  // With a timeout, waits until the collective has ended, as NCCL's work object does.
  bool wait(std::chrono::milliseconds limit) override {
    if (limit != kNoTimeout && !collective_->ends_within(limit))
      C10_THROW_ERROR(DistBackendError, "caught collective operation timeout: " + collective_->description() +
                                            " has not ended after " + std::to_string(limit.count()) + " ms");
    if (const auto error = collective_->error()) std::rethrow_exception(error);
    if (blocks_) finish();
    return true;
  }
  // Ends the event that profilers show, because the call has been issued.
  void end_event() {
    if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  }
  int sourceRank() const override {
    finish();
    return collective_->work->sourceRank();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    for (const auto& t : received_)
      if (std::find(devices.begin(), devices.end(), t.device()) == devices.end()) devices.push_back(t.device());
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
    future->markCompleted(c10::IValue(received_));
    return future;
  }

 private:
  // The name of the collective in profilers, or null if no profiler runs.
  static const char* title(const Collective& collective) {
    if (!at::hasCallbacks()) return nullptr;
    // Names that PyTorch's own backends use.
    static const std::map<std::string, std::string> names{{"allreduce", "all_reduce"},
                                                          {"allgather", "all_gather"},
                                                          {"allgather_base", "_all_gather_base"},
                                                          {"reduce_scatter_base", "_reduce_scatter_base"},
                                                          {"alltoall", "all_to_all"},
                                                          {"alltoall_base", "all_to_all"}};
    // Profilers keep a pointer to the name, so names are never freed.
    static std::map<std::string, std::string> titles;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    auto& text = titles[collective.name()];
    if (text.empty()) {
      const auto known = names.find(collective.name());
      text = (is_cuda_alias ? "nccl:" : "tandem:") + (known == names.end() ? collective.name() : known->second);
    }
    return text.c_str();
  }
  static std::optional<std::vector<at::Tensor>> inputs(const Collective& collective) {
    if (!at::hasCallbacks()) return std::nullopt;
    std::vector<at::Tensor> tensors;
    for (const auto& operand : collective.operands())
      if (operand.is_sent || collective.is_point_to_point()) tensors.push_back(operand.tensor);
    return tensors;
  }
  void finish() const {
    check(tt_synchronize());
    collective_->wait();
  }

  std::shared_ptr<Collective> collective_;
  bool blocks_;
  std::vector<at::Tensor> received_;
};

// Kernel of all operators of c10d. They return the work object, and before it their first argument, which they write,
// if the schema says so.
void communicate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(!observer, "torch.accelerator.Graph cannot replay ", op.operator_name().name,
              ": call collectives outside of the graph");
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - n);
  const auto collective = std::make_shared<Collective>(op, arguments);
  check_group(*collective);
  const bool blocks = op.operator_name().name == "c10d::barrier";
  auto work = c10::make_intrusive<Work>(collective, blocks);
  start(collective);
  work->end_event();
  const auto written = arguments[0];
  torch::jit::drop(*stack, n);
  if (schema.returns().size() > 1) stack->push_back(written);
  stack->emplace_back(c10::intrusive_ptr<c10d::Work>(std::move(work)));
}

}  // namespace

void register_collectives() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = name.name.rfind("c10d::", 0) == 0 ? dispatcher.findSchema(name) : std::nullopt;
    if (!op || op->schema().returns().empty()) continue;
    library.impl(full_name(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&communicate>());
  }
}

}  // namespace tandem
