// Calls of captured operators, which Rust traces or co-executes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>

#include "boundary/shim.h"
#include "calls/encode.h"

namespace tandem {

// Sends the encoded call of `op`, an id from declare(), to Rust. The outputs are valid until this thread's next call.
TtOuts run(uint32_t op, const Encoder& encoder);
// Sends a call of `op`, an id from declare(), with boxed arguments to Rust, and replaces them with the results.
void dispatch(uint32_t op, const c10::OperatorHandle& handle, torch::jit::Stack* stack);
// Runs `op` and copies the elements of the last encoded tensor to `to` if that tensor is contiguous and has `nbytes`
// bytes. Returns false if `op` ran like any other op; outputs that are not tensors are then in host_values().
bool fetch(uint32_t op, const Encoder& encoder, void* to, size_t nbytes);

}  // namespace tandem
