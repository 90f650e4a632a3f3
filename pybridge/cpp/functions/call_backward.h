// Backward passes of calls whose results require grad.
//
// The results of such a call belong to one node of autograd. The node of a recorded call runs the graph that the call
// has made, and records the operators; the node of a replayed call replays these operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "functions/recorded.h"

namespace tandem {

using NodePointer = decltype(torch::autograd::Edge::function);

// The graph that a call has made, from its results to the tensors that it was given.
//
// Each edge that leaves the graph gets a gate: a node that only hands its gradient on. The node of the call collects
// the gradients at the gates, one for each edge, so that autograd sums them in the order in which it would sum them
// without the cut.
struct Cut {
  // A set of results, with a bit for each.
  using Roots = uint64_t;
  static constexpr size_t kMostRoots = 64;
  static Roots only(size_t root) { return Roots{1} << root; }

  torch::autograd::edge_list roots;
  std::vector<NodePointer> nodes;
  // The roots from which each node is reached.
  std::vector<Roots> reached_from;
  std::vector<NodePointer> gates;
  // The edges that leave the graph, one for each gate.
  torch::autograd::edge_list targets;
  // The number of edges that leave from each node, in the order in which the nodes run.
  std::vector<size_t> steps;
  // The reason why the graph cannot be cut out; empty if it was.
  std::string refusal;
};

// For each root of a graph, the roots that share a node with it.
std::vector<Cut::Roots> joint_roots(const Cut& graph);

// Whether the end of an edge accepts gradients of a tensor's shape. It may not if the tensor had another shape
// (`.data`) when its node in autograd was made.
bool accepts_shape_of(const at::Tensor& t, const torch::autograd::Edge& edge);

// Cuts out the graph of `results`. Its nodes are those with at least the sequence number `first`. `arguments` are the
// arguments of the call.
Cut cut_out(at::TensorList results, at::TensorList arguments, uint64_t first);

// Tensors and storages that a recorded call keeps for its backward pass.
struct Surroundings {
  std::vector<at::Tensor> arguments;
  // Contexts of the lasting storages that the call has made; null for storages that are gone.
  std::vector<void*> saved;
  // For each of these, the storage if it is a result's. The program may drop results, and storages that are made later
  // may then have their contexts.
  std::vector<std::optional<WeakStorage>> results;
  std::vector<WeakTensor> reached;
};

// Returns tensors in place of the results of the recorded call `id`. The tensors belong to a node that runs the graph.
std::vector<at::Tensor> attach_recorded(int64_t id, Cut&& graph, Surroundings&& around, at::TensorList results,
                                        c10::ArrayRef<torch::autograd::CreationMeta> creations);

// Tensors and storages that a replayed call keeps for its backward pass.
struct Left {
  std::shared_ptr<const Recorded> call;
  int64_t id;
  std::vector<at::Tensor> arguments, watched;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> made;
};

// Makes the results of a replayed call that require grad belong to a node which replays the backward pass. `results`
// are in the order of `Recorded::results`.
void attach_replayed(Left&& left, at::TensorList results);

// Functions of the recorder that the nodes call.

// Begins the recording of a backward pass. `arguments` are the gradients of the results, followed by the arguments of
// the call. `saved` are the contexts of the lasting storages that the call has made, null for storages that are gone.
// Returns false if the pass cannot be recorded now.
bool begin_recording_backward(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved);
// Ends a recording. Returns the recording's number.
int64_t end_recording(at::TensorList results);
void cancel_recording();
// Drops a recording and its template.
void drop_recording(int64_t id);

// Function of replays that the nodes call.

// Replays a recorded backward pass. `arguments` are as for the recording, and `saved` are the storages that the call
// has made. Returns nothing if the pass cannot be replayed. `check` runs before anything is sent, and may throw.
std::optional<std::vector<at::Tensor>> replay_backward(int64_t pass, std::vector<at::Tensor> arguments,
                                                       const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& saved,
                                                       const std::function<void()>& check);

}  // namespace tandem
