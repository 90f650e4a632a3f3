// Autograd state for Rust: the running backward node, and whether backward passes stay on the calling thread.
#include <ATen/SequenceNumber.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/backward.h"
#include "boundary/shim.h"

extern "C" {

void ttc_site(TtSite* site) {
  site->sequence = at::sequence_number::peek();
  site->modes = static_cast<int32_t>(c10::get_default_dtype_as_scalartype()) << 1 | c10::GradMode::is_enabled();
  site->node = 0;
  const auto* node = tandem::running_node();
  if (!node) node = torch::autograd::get_current_node().get();
  if (node) {
    site->node_sequence = node->sequence_nr();
    // The address alone does not identify a node: a new node may have the address of a freed one.
    site->node = reinterpret_cast<uint64_t>(node) ^ (site->node_sequence << 48 | 1);
  }
}

void ttc_single_threaded_backward(int32_t on) { c10::AutogradState::get_tls_state().set_multithreading_enabled(!on); }
}
