#include "calls/call.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "boundary/errors.h"
#include "calls/decode.h"
#include "calls/function.h"
#include "calls/host_gradients.h"
#include "device/device_type.h"
#include "device/settling.h"

namespace tandem {

namespace {

void apply_resize(const TtOut& change, const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.device().type() == kTandem) {
    auto* si = impl->unsafe_storage().unsafeGetStorageImpl();
    const auto need =
        at::detail::computeStorageNbytes(c10::IntArrayRef(change.sizes, change.ndim),
                                         c10::IntArrayRef(change.strides, change.ndim), t.itemsize(), change.offset);
    si->set_nbytes(std::max(si->nbytes(), need));
  }
  impl->set_sizes_and_strides(c10::IntArrayRef(change.sizes, change.ndim),
                              c10::IntArrayRef(change.strides, change.ndim), change.offset);
}

// If the op wrote a host tensor, the gradients of that tensor and of the other operands are on the host.
void accept_host_gradients(const TtOuts& outs, const Encoder& encoder) {
  const auto wrote_host = [&](const TtOut& out) {
    return out.kind == TT_OUT_SAME && encoder.input(out.input).is_cpu();
  };
  if (std::none_of(outs.outs, outs.outs + outs.n_outs, wrote_host)) return;
  for (const auto* t : encoder.inputs())
    if (t->defined() && t->device().type() == kTandem && t->requires_grad()) accept_host_gradient(*t);
}

}  // namespace

TtOuts run(uint32_t op, const Encoder& encoder) {
  if (C10_UNLIKELY(in_flight.load(std::memory_order_relaxed) != 0)) settler->settle(encoder);
  const auto device = encoder.device();
  if (C10_UNLIKELY(encoder.host_requires_grad()) && c10::GradMode::is_enabled())
    for (const auto* t : encoder.inputs())
      if (t->defined() && t->device().is_cpu() && t->requires_grad()) accept_device_gradient(*t, device);
  if (C10_UNLIKELY(is_recording)) note_inputs(op, encoder);
  TtOuts outs{};
  const auto status = tt_dispatch(op, static_cast<uint8_t>(device), encoder.args(), encoder.size(), &outs);
  // A kernel may have resized its outputs before it raised an exception.
  for (size_t i = 0; i < outs.n_resized; i++) apply_resize(outs.resized[i], encoder.input(outs.resized[i].input));
  check(status);
  if (C10_UNLIKELY(encoder.has_host()) && c10::GradMode::is_enabled()) accept_host_gradients(outs, encoder);
  // The wait calls no operator, so the outputs stay valid.
  if (C10_UNLIKELY(encoder.draws_unordered())) check(tt_wait_random());
  return outs;
}

void dispatch(uint32_t op, const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const size_t n = handle.schema().arguments().size();
  Lease encoder;
  encoder->encode(stack->data() + (stack->size() - n), n);
  const TtOuts outs = run(op, *encoder);
  c10::SmallVector<c10::IValue, 4> results;
  for (Decoder decoder(outs, *encoder); !decoder.done();) results.push_back(decoder.next());
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(std::move(r));
}

bool fetch(uint32_t op, const Encoder& encoder, void* to, size_t nbytes) {
  if (C10_UNLIKELY(in_flight.load(std::memory_order_relaxed) != 0)) settler->settle(encoder);
  TtOuts outs;
  TtHostBuffer room{to, nbytes, 0};
  check(tt_fetch(op, static_cast<uint8_t>(encoder.device()), encoder.args(), encoder.size(), &room, &outs));
  return room.filled;
}

}  // namespace tandem
