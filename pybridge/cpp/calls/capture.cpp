#include "calls/capture.h"

#include <ATen/core/op_registration/op_registration.h>
#include <ATen/core/stack.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/execute.h"
#include "calls/library.h"
#include "calls/operators.h"
#include "device/allocator.h"

namespace tandem {

namespace {

// Sends every call of an operator to Rust.
class CaptureFunctor final : public c10::OperatorKernel {
 public:
  explicit CaptureFunctor(uint32_t op) : op_(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    dispatch(op_, handle, stack);
  }

 private:
  uint32_t op_;
};

// Captures an in-place foreach operator. Autograd does not bump the versions of tensors in a written list. PyTorch's
// kernels do, so this functor does too.
class ForeachFunctor final : public c10::OperatorKernel {
 public:
  ForeachFunctor(uint32_t op, const c10::FunctionSchema& schema) : op_(op), n_(schema.arguments().size()) {
    for (size_t i = 0; i < n_; i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(i);
    }
  }
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    end_with_inference_tensor(stack);
    c10::SmallVector<c10::IValue, 2> lists;
    for (const size_t i : written_) lists.push_back((*stack)[stack->size() - n_ + i]);
    written_before_failure() = 0;
    try {
      dispatch(op_, handle, stack);
    } catch (...) {
      for (const auto& list : lists) count(list, written_before_failure());
      throw;
    }
    for (const auto& list : lists) count(list, list.toListRef().size());
  }

 private:
  static void count(const c10::IValue& list, size_t n) {
    for (size_t i = 0; i < n; i++) list.toListRef()[i].toTensor().unsafeGetTensorImpl()->bump_version();
  }

  // Shortens all lists so that they end with the first inference tensor. Outside of inference mode, PyTorch's kernels
  // raise after writing such a tensor, which has no version counter, and leave the rest of the list unwritten. The
  // version counter itself is checked, because a tensor whose `data` was set to an inference tensor keeps its own
  // counter.
  void end_with_inference_tensor(torch::jit::Stack* stack) const {
    if (c10::InferenceMode::is_enabled() || written_.empty()) return;
    c10::IValue* args = stack->data() + (stack->size() - n_);
    const auto list = args[written_[0]].toListRef();
    const auto has_no_version = [](const c10::IValue& t) {
      return !t.toTensor().unsafeGetTensorImpl()->version_counter().enabled();
    };
    const auto first = std::find_if(list.begin(), list.end(), has_no_version);
    if (first == list.end() || first + 1 == list.end()) return;
    const size_t all = list.size(), kept = first - list.begin() + 1;
    // Lists of different lengths are not shortened, because the operator raises an error for them.
    const auto differs = [&](const c10::IValue& arg) { return arg.isList() && arg.toListRef().size() != all; };
    if (std::any_of(args, args + n_, differs)) return;
    for (size_t i = 0; i < n_; i++) {
      if (!args[i].isList()) continue;
      auto shorter = args[i].toList().copy();
      shorter.resize(kept);
      args[i] = std::move(shorter);
    }
  }

  uint32_t op_;
  size_t n_;
  c10::SmallVector<size_t, 2> written_;
};

// Captures a factory of uninitialized memory. With deterministic algorithms, the memory is then filled, as on PyTorch's
// devices. The fill is a separate op, so it depends on the setting at each call.
class EmptyFunctor final : public c10::OperatorKernel {
 public:
  explicit EmptyFunctor(uint32_t op) : op_(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    dispatch(op_, handle, stack);
    if (fills_new_memory()) at::native::fill_empty_deterministic_(stack->back().toTensor());
  }

 private:
  uint32_t op_;
};

// Kernel of operators outside of aten, which are declared at their first call.
void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) { dispatch(declare(handle), handle, stack); }

bool has_default_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Whether an operator is an `out=` variant with its own CPU kernel. Such a kernel checks dtypes, which the generated
// CompositeExplicitAutograd kernel does not do.
bool has_cpu_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return !arguments.empty() && arguments.back().is_out() && op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace

void capture(const c10::OperatorHandle& op) {
  const auto name = full_name(op.operator_name());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return;
  // An operator that has both a CPU kernel and a decomposition is not decomposed on the CPU, so it is captured.
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU))
    return;
  if (has_default_kernel(op) && !has_cpu_out(op) && !tt_captures_default(name.data(), name.size())) return;
  const uint32_t id = declare(op);
  const auto& base = op.operator_name().name;
  const bool foreach = base.rfind("aten::_foreach_", 0) == 0 && base.back() == '_';
  const bool empty = name == "aten::empty.memory_format" || name == "aten::empty_strided";
  using torch::CppFunction;
  auto function = foreach ? CppFunction::makeFromBoxedFunctor(std::make_unique<ForeachFunctor>(id, op.schema()))
                  : empty ? CppFunction::makeFromBoxedFunctor(std::make_unique<EmptyFunctor>(id))
                          : CppFunction::makeFromBoxedFunctor(std::make_unique<CaptureFunctor>(id));
  library(c10::DispatchKey::PrivateUse1).impl(name.substr(6).c_str(), std::move(function));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace tandem
