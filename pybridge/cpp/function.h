// Calls of functions: what a recorded call uses of the program's tensors, and the replay of a template.
#pragma once

#include "encode.h"

namespace torch::autograd {
struct Edge;
}

namespace tandem {

// Whether a call of a function is being recorded.
extern bool is_recording;
// Notes the inputs of an operator that the program's thread calls, before the call.
void note_inputs(const Encoder& encoder);
// Notes that the program's thread has read the value of a tensor with a single element.
void note_read(const at::Tensor& from, const at::Scalar& value);
// Notes a root of a backward pass that frees the graph.
void note_consumed(const torch::autograd::Edge& root);

}  // namespace tandem
