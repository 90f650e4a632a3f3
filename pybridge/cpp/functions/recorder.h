// The recorder of calls of functions.
//
// Rust records the operators of a call. The recorder adds the facts that only PyTorch knows: the tensors that the
// storages belong to, gradients, versions, results, and the effects of the call on the host.
#pragma once

#include <ATen/SequenceNumber.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "boundary/shim.h"
#include "calls/encode.h"
#include "device/device_type.h"
#include "functions/call_backward.h"
#include "functions/host_effects.h"
#include "functions/recorded.h"

namespace tandem {

using torch::autograd::Node;

inline bool is_tandem(const at::Tensor& t) { return t.defined() && t.device().type() == kTandem; }

// The identity of a version counter. PyTorch has no accessor for the pointer that a `VariableVersion` consists of.
inline const void* counter_of(const c10::VariableVersion& version) {
  static_assert(sizeof(version) == sizeof(void*));
  const void* counter;
  std::memcpy(&counter, static_cast<const void*>(&version), sizeof counter);
  return counter;
}

// Calls `visit` with each node reachable from `root`, until it returns false.
template <class Visit>
void each_node(const torch::autograd::Edge& root, Visit&& visit) {
  std::unordered_set<Node*> met;
  std::vector<Node*> open{root.function.get()};
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (!met.insert(node).second) continue;
    if (!visit(*node)) return;
    for (const auto& edge : node->next_edges())
      if (edge.is_valid()) open.push_back(edge.function.get());
  }
}
// The recording of the running call.
class Recorder {
 public:
  // `reached` are the tensors that the function's code can reach by names, and `counters` the host tensors that calls
  // increment. `reads_gradients` says whether the code may depend on which tensors have gradients.
  Recorder(at::TensorList arguments, at::TensorList reached, at::TensorList counters, const Recorded* before,
           bool reads_gradients);
  // Records a backward pass. `saved` are the contexts of the storages that the pass's call has made, null for storages
  // that are gone.
  Recorder(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved, at::TensorList counters = {});

  void note(const Encoder& encoder);
  // Notes a view at an offset in the storage.
  void use_offset(const at::Tensor& of);
  void read(const at::Tensor& from, const at::Scalar& value);
  void consume(const torch::autograd::Edge& root);
  // Ends the recording. Returns its number. With `attaches`, results that require grad may be replaced by tensors that
  // belong to a node whose backward pass is recorded.
  int64_t finish(std::vector<at::Tensor>& results, bool attaches);
  void refuse(std::string why) {
    if (call_.refusal.empty()) call_.refusal = std::move(why);
  }

 private:
  // Watches a tensor from now on. Returns the tensor's number.
  size_t watch(const at::Tensor& t);
  // The base of a view; undefined if there is none, or if Python code defines it, which is refused.
  at::Tensor base_of(const at::Tensor& t);
  // Watches a tensor that the call uses now.
  void use(const at::Tensor& t);
  // Whether a watched tensor is reached by names or used by this call, and not only by the previous call.
  bool is_kept(size_t number) const { return number < reached_ || used_[number] != 0; }
  // Whether the call was given a storage that is known only as a gradient's.
  bool uses_gradients(const TtRecorded& in_rust) const;
  void find_given(const TtRecorded& in_rust);
  void keep_watched();
  void find_fed(int64_t id, size_t hosts);
  // Finds the bases of results that are views.
  void find_bases(at::TensorList results, const TtRecorded& in_rust);
  void find_results(at::TensorList results, const std::vector<bool>& consumed, bool attaches,
                    const TtRecorded& in_rust);
  // Cuts out the graph of the results that require grad.
  std::optional<Cut> find_graph(at::TensorList results, bool has_backward);
  void attach(int64_t id, Cut&& graph, Surroundings&& around, std::vector<at::Tensor>& results) const;
  // Refuses the call if a tensor that it has made is in use after the call and is neither a result nor a gradient.
  void refuse_kept(const TtRecorded& in_rust);
  Surroundings surroundings(at::TensorList results, const TtRecorded& in_rust) const;
  void find_gradients(const TtRecorded& in_rust);
  void find_owners();
  void find_changes();
  std::optional<Result> place(const at::Tensor& t, const TtRecorded& in_rust) const;
  // Finds the argument or the watched tensor of which a tensor is a view that no operator has seen.
  std::optional<Result> place_beside(const at::Tensor& t) const;
  bool is_consumed(const at::Tensor& t) const;
  size_t argument_on(const void* identity) const;
  // Whether a tensor is a view that the call has made. The call's graph may keep such a view.
  bool is_made_view(const at::Tensor& t) const {
    return t.is_view() && t.grad_fn() && t.grad_fn()->sequence_nr() >= first_node_;
  }
  // Whether a tensor that no name reaches is a view of a watched one, or shares its storage. The call has made it, and
  // autograd may keep it until the call's backward pass.
  bool is_made_of_watched(const at::Tensor& t) const {
    const auto reached = call_.watched.begin() + static_cast<std::ptrdiff_t>(std::min(reached_, call_.watched.size()));
    const auto is_of = [&](const Watched& w) { return w.context == identity(t); };
    return t.is_view() || std::any_of(call_.watched.begin(), reached, is_of);
  }
  // Whether the storage of a tensor is an argument's, and the argument contains all elements of the tensor.
  bool is_within_argument(const at::Tensor& t) const;

  Recorded call_;
  std::vector<at::Tensor> arguments_;
  // The numbers of the arguments on each storage, by the storage's context.
  std::unordered_map<void*, std::vector<size_t>> arguments_on_;
  std::vector<uint32_t> argument_versions_;
  // The autograd nodes that the arguments belong to.
  std::vector<Node*> argument_nodes_;
  // For a backward pass, the contexts of the storages that the call has made.
  std::vector<void*> saved_;
  // The sequence number of the first node that the call makes.
  uint64_t first_node_ = at::sequence_number::peek();
  // Number of watched tensors that the function can reach by names. They come first.
  size_t reached_ = 0;
  // The number of each watched tensor in the order of first use by the call; 0 for a tensor that the call has not used.
  std::vector<size_t> used_;
  size_t uses_ = 0;
  ska::flat_hash_map<const c10::TensorImpl*, size_t> seen_;
  std::vector<torch::autograd::Edge> consumed_;
  HostEffects host_;
};

}  // namespace tandem
