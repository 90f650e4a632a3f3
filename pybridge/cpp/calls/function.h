// Calls of functions and captured graphs: what is noted of operators while one of them is recorded.
//
// functions/recorder.cpp defines it. It is declared here because calls and backward passes note, and the recorder needs
// both of them.
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
// Notes why the call cannot be replayed.
void note_refusal(const char* why);
// Notes a root of a backward pass that frees the graph.
void note_consumed(const torch::autograd::Edge& root);

}  // namespace tandem
