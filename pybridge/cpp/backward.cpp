// Backward on the calling thread: what PyTorch's engine does, with less around each node.
//
// Nodes run in the engine's order and gradients are added up as it adds them up, so that the results have its bits.
// Whatever it does beside that (hooks, anomaly mode, profiling) is left to it.
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <queue>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "backward.h"
#include "values.h"

namespace tandem {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local const Node* running = nullptr;

// Whether nodes of this type are the program's Python code. The class is in a library that this one does not link.
bool is_python(const std::type_info& type) {
  thread_local ska::flat_hash_map<const std::type_info*, bool> known;
  const auto found = known.find(&type);
  if (found != known.end()) return found->second;
  return known.emplace(&type, std::strstr(type.name(), "PyNode") != nullptr).first->second;
}

// A compiled graph's node asks PyTorch's engine whether it may give its memory away.
bool is_compiled(const Node& node) {
  if (!is_python(typeid(node))) return false;
  std::pair<const Node*, bool> asked{&node, false};
  // It looks at a Python object.
  tt_with_gil(
      [](void* data) {
        auto& [node, answer] = *static_cast<decltype(asked)*>(data);
        answer = node->is_aot_backward();
      },
      &asked);
  return asked.second;
}

bool is_unusual(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr || is_compiled(node);
}

// A node on its way: the gradients that have arrived, and how many are still to come.
struct Pending {
  Node* node;
  variable_list grads;
  int missing = 0;
  // It leads to a gradient that is asked for, so it runs.
  bool needed = true;
  // Gradients that arrive here are asked for.
  bool captured = false;
};

// The nodes between some roots and some inputs, or all below the roots where no inputs are named.
class Graph {
 public:
  // Nodes older than that may have hooks on what they saved.
  explicit Graph(int64_t hooked_before) : hooked_before_(hooked_before) {}

  // False where there is something that is left to PyTorch's engine.
  bool discover(const edge_list& roots, const edge_list& inputs) {
    for (const auto& input : inputs) least_ = std::min(least_, input.function->topological_nr());
    if (inputs.empty()) least_ = 0;
    for (const auto& root : roots)
      if (!meet(root)) return false;
    for (size_t next = 0; next < pending_.size(); next++)
      for (const auto& edge : pending_[next].node->next_edges())
        if (leads_on(edge) && !meet(edge)) return false;
    return inputs.empty() || choose(inputs);
  }

  // Where an edge leads to, or null where nobody asks for what comes there.
  Pending* at(const Edge& edge) {
    if (!leads_on(edge)) return nullptr;
    auto& next = pending_[places_.find(edge.function.get())->second];
    return next.needed || next.captured ? &next : nullptr;
  }

 private:
  // A node with a lower number cannot lead to any of the inputs.
  bool leads_on(const Edge& edge) const { return edge.is_valid() && edge.function->topological_nr() >= least_; }

  bool meet(const Edge& edge) {
    Node* node = edge.function.get();
    const auto [place, is_new] = places_.emplace(node, pending_.size());
    if (is_new) {
      if (node->sequence_nr() < hooked_before_ || is_unusual(*node)) return false;
      pending_.push_back({node, {}});
    }
    pending_[place->second].missing++;
    return true;
  }

  // Leaves out what leads to no input. A node that runs computes what all its edges ask for, so all must be needed:
  // PyTorch's engine can tell it to leave some out.
  bool choose(const edge_list& inputs) {
    for (const auto& input : inputs) {
      const auto place = places_.find(input.function.get());
      if (place == places_.end()) return false;
      pending_[place->second].captured = true;
    }
    std::vector<Pending*> order;
    for (auto& node : pending_) order.push_back(&node);
    std::sort(order.begin(), order.end(),
              [](const auto* a, const auto* b) { return a->node->topological_nr() < b->node->topological_nr(); });
    for (auto* next : order) {
      const auto& edges = next->node->next_edges();
      const auto asked = [&](const Edge& edge) { return at(edge) != nullptr; };
      next->needed = false;
      next->needed = std::any_of(edges.begin(), edges.end(), asked);
      const auto spare = [&](const Edge& edge) { return edge.is_valid() && !at(edge); };
      if (next->needed && std::any_of(edges.begin(), edges.end(), spare)) return false;
    }
    return true;
  }

  uint64_t hooked_before_;
  uint64_t least_ = std::numeric_limits<uint64_t>::max();
  ska::flat_hash_map<Node*, size_t> places_;
  std::vector<Pending> pending_;
};

// Whether a sum may be written over this addend: nobody else can see it, and no graph is made.
bool is_ours(const at::Tensor& t) {
  return !c10::GradMode::is_enabled() && !at::isTensorSubclassLike(t) && t.is_non_overlapping_and_dense() && !t._is_zerotensor() &&
         t.use_count() == 1 && t.has_storage() && t.storage().use_count() == 1;
}

void add_up(at::Tensor& sum, at::Tensor&& grad) {
  if (!grad.defined()) return;
  if (!sum.defined())
    sum = std::move(grad);
  else if (is_ours(sum) && !at::isTensorSubclassLike(grad))
    sum.add_(grad);
  else
    sum = sum + grad;
}

// A later forward op's node is first; what accumulates gradients comes before all others.
struct Later {
  bool operator()(const Pending* a, const Pending* b) const {
    return a->node->sequence_nr() < b->node->sequence_nr();
  }
};

class Running {
 public:
  explicit Running(const Node* node) : before_(std::exchange(running, node)) {}
  ~Running() { running = before_; }

 private:
  const Node* before_;
};

variable_list run(Node& node, variable_list&& grads, bool keep_graph) {
  const Running guard(&node);
  if (!keep_graph) node.will_release_variables();
  auto outputs = node(std::move(grads));
  torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& text) {
    return "Function " + node.name() + " returned an " + text;
  });
  if (!keep_graph) node.release_variables();
  return outputs;
}

void execute(Graph& graph, const edge_list& roots, variable_list&& grads, bool keep_graph) {
  std::priority_queue<Pending*, std::vector<Pending*>, Later> ready;
  const auto pass = [&](const edge_list& edges, variable_list& outputs) {
    for (size_t i = 0; i < edges.size(); i++) {
      auto* next = graph.at(edges[i]);
      if (!next) continue;
      if (next->grads.empty()) next->grads.resize(next->node->num_inputs());
      add_up(next->grads[edges[i].input_nr], std::move(outputs[i]));
      if (--next->missing == 0) ready.push(next);
    }
  };
  pass(roots, grads);
  while (!ready.empty()) {
    Pending& next = *ready.top();
    ready.pop();
    if (!next.needed) continue;
    auto arrived = next.captured ? next.grads : std::move(next.grads);
    auto outputs = run(*next.node, std::move(arrived), keep_graph);
    pass(next.node->next_edges(), outputs);
  }
}

using Tensors = c10::List<std::optional<at::Tensor>>;
using Gradients = std::tuple<bool, Tensors>;

// Of many gradients at once, the pass is PyTorch's.
Gradients leave(at::TensorList, const Tensors&, at::TensorList, bool, bool, int64_t) { return {false, Tensors()}; }

// Sets the gradients below the roots, or gives those of the inputs. False where that is left to PyTorch's engine: then
// nothing has happened.
Gradients backward(at::TensorList roots, const Tensors& root_grads, at::TensorList inputs, bool keep_graph,
                   bool create_graph, int64_t hooked_before) {
  const Gradients left(false, Tensors());
  // Nodes ask a pass that is under way what they are to compute.
  const bool inside = running || torch::autograd::get_current_graph_task_id() >= 0;
  if (inside || torch::autograd::AnomalyMode::is_enabled() || at::getStepCallbacksUnlessEmpty(at::RecordScope::BACKWARD_FUNCTION)) return left;
  edge_list edges, asked;
  variable_list grads;
  for (size_t i = 0; i < roots.size(); i++) {
    const std::optional<at::Tensor> grad = root_grads.get(i);
    if (!grad || roots[i].device().type() != kTandem) return left;
    edges.push_back(torch::autograd::impl::gradient_edge(roots[i]));
    if (!edges.back().is_valid()) return left;
    grads.push_back(*grad);
  }
  for (const auto& input : inputs) {
    // The accumulator of a leaf that no op has used yet does not exist, and then the graph does not lead to it.
    const auto leaf = input.is_leaf();
    asked.emplace_back(leaf ? torch::autograd::impl::try_get_grad_accumulator(input) : input.grad_fn(),
                       leaf ? 0 : input.output_nr());
    if (!asked.back().is_valid()) return left;
  }
  Graph graph(hooked_before);
  if (!graph.discover(edges, asked)) return left;
  const c10::AutoGradMode grad_mode(create_graph);
  torch::autograd::validate_outputs(edges, grads, [](const std::string& text) { return text; });
  execute(graph, edges, std::move(grads), keep_graph);
  Tensors captured;
  for (const auto& edge : asked) {
    const auto& arrived = graph.at(edge)->grads;
    const auto grad = arrived.empty() ? at::Tensor() : arrived[edge.input_nr];
    captured.push_back(grad.defined() ? std::optional(grad) : std::nullopt);
  }
  return {true, captured};
}

TORCH_LIBRARY(torch_tandem, m) {
  m.def(
      "backward(Tensor[] roots, Tensor?[] grads, Tensor[] inputs, bool keep_graph, bool create_graph, "
      "int hooked_before) -> (bool, Tensor?[])");
}
TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) { m.impl("backward", backward); }
TORCH_LIBRARY_IMPL(torch_tandem, Batched, m) { m.impl("backward", leave); }

}  // namespace

const torch::autograd::Node* running_node() { return running; }

}  // namespace tandem
