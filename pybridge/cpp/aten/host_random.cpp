#include "aten/host_random.h"

#include <ATen/core/op_registration/op_registration.h>
#include <ATen/core/stack.h>

#include <memory>
#include <utility>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/library.h"
#include "calls/operators.h"

namespace tandem {

namespace {

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

}  // namespace

void order_host_random(const c10::OperatorHandle& op) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return;
  // `_fused_sdp_choice` has the tag of random operators, but its number does not depend on chance.
  const auto& returns = op.schema().returns();
  if (!returns.empty() && returns[0].type()->kind() == c10::TypeKind::IntType) return;
  auto kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  library(c10::DispatchKey::CPU)
      .impl(full_name(op.operator_name()).substr(6).c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<HostRandomFunctor>(std::move(kernel))));
}

}  // namespace tandem
