// Registers allocators, hooks and kernels with PyTorch.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <mutex>

#include "aten/host_random.h"
#include "aten/sparse.h"
#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/capture.h"
#include "calls/host_calls.h"
#include "collectives/collectives.h"
#include "device/allocator.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "device/profiler.h"
#include "device/threads.h"

namespace tandem {

namespace {

void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    capture(*op);
    order_host_random(*op);
    implement_sparse(*op);
  }
}

}  // namespace

}  // namespace tandem

extern "C" int32_t ttc_register() {
  static std::once_flag once;
  const auto all = [] {
    // Suppresses PyTorch's warnings about overridden CPU kernels of random operators, because overriding them is
    // intended.
    struct Silent final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    tandem::initialize_vector_math();
    tandem::register_host_allocator();
    tandem::register_hooks();
    tandem::register_allocator();
    tandem::register_profiler();
    tandem::register_operators();
    tandem::register_collectives();
    tandem::count_host_calls();
  };
  return tandem::or_kept(int32_t{TT_RAISE}, [&] {
    std::call_once(once, all);
    return int32_t{TT_OK};
  });
}
