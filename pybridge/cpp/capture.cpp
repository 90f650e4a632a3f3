// Registration of operators: the dispatcher calls that Tandem captures.
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "allocator.h"
#include "call.h"
#include "encode.h"
#include "errors.h"
#include "execute.h"
#include "hooks.h"
#include "host_calls.h"
#include "host_memory.h"
#include "operators.h"
#include "shim.h"

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

// Captures an in-place foreach operator. Autograd does not bump the versions of tensors in a written list; PyTorch's
// kernels do, and so does this functor.
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

  // An inference tensor has no version counter, so PyTorch's kernels raise after writing the first one outside of
  // inference mode and leave the rest of the list unwritten. Shortens all lists to end with that tensor. Checks the
  // version counter itself, because a tensor whose `data` was set to an inference tensor keeps its own counter.
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
    // Lists of different lengths stay as they are: the operator raises an error for them.
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

// Captures a factory of uninitialized memory. With deterministic algorithms the memory is then filled, as on PyTorch's
// devices. The fill is a separate op, so it appears and disappears with the setting.
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
void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  dispatch(declare(handle), handle, stack);
}

// Copies between devices, or from or to the host, as the op `aten::copy_`.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  static const uint32_t id = declare(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  TORCH_CHECK_NOT_IMPLEMENTED(self.layout() == c10::Layout::Strided,
                              "tandem supports dense tensors only, but a tensor with layout ", self.layout(),
                              " is copied to or from it; call .to_dense() first");
  Lease encoder;
  encoder->begin(3, 2, /*may_cross=*/true);
  encoder->add(to);
  encoder->add(self);
  encoder->add(non_blocking);
  run(id, *encoder);
  return to;
}

// Wraps the CPU kernel of a random operator: waits for GraphRunner's pending draws, then calls the kernel.
class HostRandomFunctor final : public c10::OperatorKernel {
 public:
  explicit HostRandomFunctor(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    check(tt_wait_random());
    kernel_.callBoxed(handle, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

bool has_default_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Whether an operator is an `out=` variant with its own CPU kernel. Such a kernel checks dtypes that the generated
// CompositeExplicitAutograd kernel does not.
bool has_cpu_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return !arguments.empty() && arguments.back().is_out() && op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace

torch::Library& library(c10::DispatchKey key) {
  static std::unordered_map<int, std::unique_ptr<torch::Library>> libraries;
  auto& lib = libraries[static_cast<int>(key)];
  if (!lib) lib = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  return *lib;
}

// Makes a random CPU operator wait for pending draws: it draws from the same generator as GraphRunner, and draws must
// happen in program order.
static void order_host_random(const c10::OperatorHandle& op) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return;
  auto kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  library(c10::DispatchKey::CPU)
      .impl(full_name(op.operator_name()).substr(6).c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<HostRandomFunctor>(std::move(kernel))));
}

// Registers a capturing kernel for an aten operator, unless PyTorch's own registrations already lead to captured ones.
static void capture(const c10::OperatorHandle& op) {
  const auto name = full_name(op.operator_name());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return;
  // An operator that has a CPU kernel besides its decomposition is not decomposed on the CPU, so it is captured.
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

static void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    capture(*op);
    order_host_random(*op);
  }
}

void not_supported(const c10::OperatorHandle& handle, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "tandem supports dense tensors only: ", handle.operator_name(),
      " makes or takes a sparse or quantized one. Keep that tensor on the CPU, or call .to_dense() or "
      ".dequantize() first");
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_supported>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
}

// Without these fallthroughs, PyTorch would materialize a lazily conjugated or negated source with an additional copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace tandem

extern "C" int32_t ttc_register() {
  static std::once_flag once;
  const auto all = [] {
    // Suppresses PyTorch's warnings that the CPU kernels of random operators are overridden, which is intended.
    struct Silent final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    tandem::register_host_allocator();
    tandem::register_hooks();
    tandem::register_allocator();
    tandem::register_operators();
    tandem::count_host_calls();
  };
  return tandem::or_kept(int32_t{TT_RAISE}, [&] {
    std::call_once(once, all);
    return int32_t{TT_OK};
  });
}
