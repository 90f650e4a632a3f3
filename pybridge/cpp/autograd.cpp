// What Rust asks of autograd: which backward node runs, and whether backward stays on this thread.
#include <ATen/SequenceNumber.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shim.h"

extern "C" {

int64_t ttc_current_node(uint64_t* id) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return -1;
  *id = reinterpret_cast<uint64_t>(node.get());
  return static_cast<int64_t>(node->sequence_nr());
}

uint64_t ttc_sequence_peek() { return at::sequence_number::peek(); }

int32_t ttc_grad_enabled() { return c10::GradMode::is_enabled(); }

void ttc_single_threaded_backward(int32_t on) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(!on);
}
}
