// PyTorch samples the calls of the dispatcher: on average it passes one of `kEach` calls to the callback, and only
// counts the other calls down.
#include "calls/host_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "boundary/shim.h"

namespace tandem {

namespace {

// Number of calls for each sampled call.
constexpr uint64_t kEach = 64;
std::atomic<uint64_t> seen{0};

bool is_on_host(const at::Tensor& t) { return t.defined() && t.is_cpu(); }
bool is_elsewhere(const at::Tensor& t) { return t.defined() && !t.is_cpu(); }

// Whether a call has tensor arguments and all of them are on the host.
bool takes_host_tensors(c10::ArrayRef<const c10::IValue> inputs) {
  bool some = false;
  for (const auto& value : inputs) {
    if (value.isTensor()) {
      if (is_elsewhere(value.toTensor())) return false;
      some |= is_on_host(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        if (is_elsewhere(t)) return false;
        some |= is_on_host(t);
      }
    }
  }
  return some;
}

// Whether an operator would be captured on Tandem: it is neither a view nor composed of other operators.
bool computes(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  bool view = alias && !alias->isWrite();
  return !view && (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || schema.name() == "aten::copy_");
}

// Callback for sampled calls.
std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  auto name = call.operator_name();
  if (!name || !tt_is_program() || !takes_host_tensors(call.inputs())) return nullptr;
  auto op = c10::Dispatcher::singleton().findOp(*name);
  if (op && computes(*op)) seen.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

}  // namespace

void count_host_calls() {
  auto callback = at::RecordFunctionCallback(&look);
  callback.needsInputs(true).samplingProb(1.0 / kEach).scopes({at::RecordScope::FUNCTION});
  at::addGlobalCallback(callback);
}

}  // namespace tandem

extern "C" uint64_t ttc_host_calls() { return tandem::seen.load(std::memory_order_relaxed) * tandem::kEach; }

extern "C" void ttc_reset_host_calls() { tandem::seen.store(0, std::memory_order_relaxed); }
