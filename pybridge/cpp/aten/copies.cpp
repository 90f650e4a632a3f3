// Copies between devices, and from and to the host, as the op `aten::copy_`.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "calls/call.h"
#include "calls/encode.h"
#include "calls/operators.h"

namespace tandem {

namespace {

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

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_copy_from", copy_from); }

// Without these fallthroughs, PyTorch would materialize a lazily conjugated or negated source with an additional copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace tandem
