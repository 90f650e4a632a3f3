// Calls of functions and captured graphs: notes about operators that run while a call or a graph is recorded.
//
// functions/recorder.cpp defines these functions. They are declared here because calls and backward passes call them,
// and the recorder needs the headers of both.
#pragma once

#include <cstdint>

#include "calls/encode.h"
#include "device/observer.h"

namespace torch::autograd {
struct Edge;
}

namespace tandem {

// Notes the inputs of an operator that the program's thread calls, before the call.
void note_inputs(uint32_t op, const Encoder& encoder);
// Notes that the program's thread has read the value of a tensor with a single element.
void note_read(const at::Tensor& from, const at::Scalar& value);
// Notes that the call cannot be replayed, with the reason.
void note_refusal(const char* why);
// Notes that the program's thread makes a view of a tensor at an offset in the storage.
void note_offset(const at::Tensor& of);
// Notes a root of a backward pass that frees its graph.
void note_consumed(const torch::autograd::Edge& root);

}  // namespace tandem
