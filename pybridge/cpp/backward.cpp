// Backward on the calling thread: what PyTorch's engine does, with less around each node.
//
// Nodes run in the engine's order and gradients are added up as it adds them up, so that the results have its bits.
// To the engine the pass is one node, so that whatever belongs to a pass and not to a node is the engine's.
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ThreadLocalState.h>
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
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
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

// A node in the pointer that PyTorch's edges hold: an intrusive_ptr from torch 2.13 on, a shared_ptr before.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<T>(std::forward<Args>(args)...);
  }
}

// Whether nodes of this type are the program's Python code. The class is in a library that this one does not link.
bool is_python(const std::type_info& type) {
  thread_local ska::flat_hash_map<const std::type_info*, bool> known;
  const auto found = known.find(&type);
  if (found != known.end()) return found->second;
  return known.emplace(&type, std::strstr(type.name(), "PyNode") != nullptr).first->second;
}

// Whether the program's code runs in a node or around it. Hooks may come while the pass runs, so this is asked at the
// node's turn.
bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr || is_python(typeid(node));
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
  Graph(const edge_list& roots, const edge_list& inputs) {
    for (const auto& input : inputs) least_ = std::min(least_, input.function->topological_nr());
    if (inputs.empty()) least_ = 0;
    if (roots.size() == 1) only_root_ = roots[0].function.get();
    for (const auto& root : roots)
      if (only_root_ || leads_on(root)) meet(root);
    for (size_t next = 0; next < pending_.size(); next++)
      for (const auto& edge : pending_[next].node->next_edges())
        if (leads_on(edge)) meet(edge);
    if (!inputs.empty()) choose(inputs);
  }

  // Where an edge leads to, or null where nobody asks for what comes there.
  Pending* at(const Edge& edge) {
    const auto place = places_.find(edge.function.get());
    if (place == places_.end()) return nullptr;
    auto& next = pending_[place->second];
    return next.needed || next.captured || next.node == only_root_ ? &next : nullptr;
  }

  // Has PyTorch's record of the pass tell which nodes run, and nodes which of their gradients are asked for. Only a pass
  // with `inputs` names the nodes that run: else all do.
  void tell_the_record(bool with_inputs) const {
    using torch::autograd::GraphTask;
    // The record belongs to the pass that runs, and nobody else is told of it before its first node runs.
    auto& met = const_cast<std::unordered_set<Node*>&>(*torch::autograd::get_current_graph_task_nodes_in_graph());
    met.reserve(pending_.size());
    for (const auto& next : pending_)
      if (next.node != only_root_) met.insert(next.node);
    if (!with_inputs) return;
    auto& infos =
        const_cast<std::unordered_map<Node*, GraphTask::ExecInfo>&>(*torch::autograd::get_current_graph_task_exec_info());
    for (const auto& next : pending_) {
      auto& info = infos[next.node];
      info.needed_ = next.needed;
      if (next.captured) info.captures_ = std::make_unique<std::vector<GraphTask::ExecInfo::Capture>>();
    }
  }

 private:
  // A node with a lower number cannot lead to any of the inputs.
  bool leads_on(const Edge& edge) const { return edge.is_valid() && edge.function->topological_nr() >= least_; }

  void meet(const Edge& edge) {
    Node* node = edge.function.get();
    const auto [place, is_new] = places_.emplace(node, pending_.size());
    if (is_new) pending_.push_back({node, {}});
    pending_[place->second].missing++;
  }

  // Leaves out what leads to no input.
  void choose(const edge_list& inputs) {
    for (const auto& input : inputs) {
      const auto place = places_.find(input.function.get());
      if (place != places_.end()) pending_[place->second].captured = true;
    }
    std::vector<Pending*> order;
    for (auto& node : pending_) order.push_back(&node);
    std::sort(order.begin(), order.end(),
              [](const auto* a, const auto* b) { return a->node->topological_nr() < b->node->topological_nr(); });
    for (auto* next : order) {
      const auto& edges = next->node->next_edges();
      next->needed = false;
      next->needed = std::any_of(edges.begin(), edges.end(), [&](const Edge& edge) { return at(edge) != nullptr; });
    }
  }

  uint64_t least_ = std::numeric_limits<uint64_t>::max();
  // The engine begins with an only root, needed or not, and does not count it among the nodes that it met.
  const Node* only_root_ = nullptr;
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

variable_list call_tensor_hooks(Node& node, variable_list&& grads) {
  for (const auto& hook : node.tensor_pre_hooks()) grads = (*hook)(grads);
  for (const auto& hook : node.retains_grad_hooks()) grads = (*hook.second)(grads);
  return std::move(grads);
}

void refuse_nan(const Node& node, const variable_list& outputs) {
  const c10::AutoGradMode no_graph(false);
  for (size_t i = 0; i < outputs.size(); i++)
    if (outputs[i].defined() && at::isnan(outputs[i])._is_any_true().item<bool>())
      throw std::runtime_error("Function '" + node.name() + "' returned nan values in its " + std::to_string(i) +
                               "th output.");
}

variable_list run(Node& node, variable_list&& grads, bool keep_graph) {
  grads = call_tensor_hooks(node, std::move(grads));
  for (const auto& hook : node.pre_hooks()) grads = (*hook)(grads);
  if (!keep_graph) node.will_release_variables();
  variable_list outputs;
  if (node.post_hooks().empty()) {
    outputs = node(std::move(grads));
  } else {
    // Post hooks are called with the gradients that the node received, so the node gets a copy. Where the node itself
    // adds its first post hook, there is no copy, as in PyTorch's engine.
    auto copy = grads;
    outputs = node(std::move(copy));
  }
  torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& text) {
    return "Function " + node.name() + " returned an " + text;
  });
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, grads);
  if (!keep_graph) node.release_variables();
  if (C10_UNLIKELY(torch::autograd::AnomalyMode::is_enabled()) && torch::autograd::AnomalyMode::should_check_nan())
    refuse_nan(node, outputs);
  return outputs;
}

// What nodes find in thread-local state. The program's code may change it; each node begins with what the pass had.
class Surroundings {
 public:
  // Has `body` leave nothing behind, whatever it is.
  template <typename Body>
  void keep(Body&& body) const {
    const at::ThreadLocalStateGuard guard(state_);
    body();
  }

  // Undoes what hooks on saved tensors can have left behind.
  void check() const {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    if (C10_UNLIKELY(c10::GradMode::is_enabled() != grad_mode_ || !(keys.included_ == keys_.included_) ||
                     !(keys.excluded_ == keys_.excluded_)))
      at::ThreadLocalState::setThreadLocalState(state_);
  }

 private:
  at::ThreadLocalState state_;
  bool grad_mode_ = c10::GradMode::is_enabled();
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
};

// Where PyTorch's engine leaves a gradient that is asked for. A pass that has one is a `grad()`, and nodes know it.
struct Sink final : Node {
  Sink() : Node(uint64_t{0}) { add_input_metadata(undefined_input()); }
  variable_list apply(variable_list&&) override { return {}; }
};

// A whole pass, as one node of PyTorch's engine. The engine gives it what belongs to a pass (its number, its
// callbacks, its thread-local state, its warnings), and the pass runs the program's nodes.
class Pass final : public Node {
 public:
  Pass(edge_list roots, variable_list grads, const edge_list& inputs, bool keep_graph)
      : Node(std::numeric_limits<uint64_t>::max()),
        graph_(roots, inputs),
        roots_(std::move(roots)),
        grads_(std::move(grads)),
        has_inputs_(!inputs.empty()),
        keep_graph_(keep_graph) {
    // The engine runs a node of the host's on the calling thread.
    add_input_metadata(token());
    if (has_inputs_) add_next_edge({make_node<Sink>(), 0});
  }

  static const at::Tensor& token() {
    static const at::Tensor token = at::detail::empty_cpu({}, at::TensorOptions(at::kFloat));
    return token;
  }

  // The node that runs: errors are its.
  std::string name() const override { return current_ ? current_->name() : "Pass"; }

  variable_list apply(variable_list&&) override {
    graph_.tell_the_record(has_inputs_);
    const Surroundings surroundings;
    std::priority_queue<Pending*, std::vector<Pending*>, Later> ready;
    const auto pass = [&](const edge_list& edges, variable_list& outputs) {
      for (size_t i = 0; i < outputs.size(); i++) {
        auto* next = graph_.at(edges[i]);
        if (!next) continue;
        if (next->grads.empty()) next->grads.resize(next->node->num_inputs());
        add_up(next->grads[edges[i].input_nr], std::move(outputs[i]));
        if (--next->missing == 0) ready.push(next);
      }
    };
    {
      const Running guard(roots_.front().function.get());
      pass(roots_, grads_);
    }
    grads_.clear();
    while (!ready.empty()) {
      auto& next = *ready.top();
      ready.pop();
      current_ = next.node;
      const Running guard(current_);
      variable_list outputs;
      if (is_watched(*current_)) {
        surroundings.keep([&] { outputs = evaluate(next); });
      } else {
        outputs = evaluate(next);
        surroundings.check();
      }
      pass(current_->next_edges(), outputs);
    }
    return variable_list(num_outputs());
  }

  // What arrived at an edge.
  at::Tensor captured(const Edge& edge) {
    const auto* end = graph_.at(edge);
    return end && !end->grads.empty() ? end->grads[edge.input_nr] : at::Tensor();
  }

 private:
  variable_list evaluate(Pending& next) {
    if (!next.needed) {
      next.grads = call_tensor_hooks(*next.node, std::move(next.grads));
      return {};
    }
    auto arrived = next.captured ? next.grads : std::move(next.grads);
    return run(*next.node, std::move(arrived), keep_graph_);
  }

  Graph graph_;
  edge_list roots_;
  variable_list grads_;
  bool has_inputs_;
  bool keep_graph_;
  Node* current_ = nullptr;
};

// The pass is entered through an operator, which the program's overrides must not see; its nodes do see them.
class Overrides {
 public:
  explicit Overrides(int64_t disabled) : before_(State::get_disabled_state()) {
    State::set_disabled_state(static_cast<at::impl::TorchFunctionDisabledState>(disabled));
  }
  ~Overrides() { State::set_disabled_state(before_); }

 private:
  using State = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before_;
};

using Tensors = c10::List<std::optional<at::Tensor>>;
using Gradients = std::tuple<bool, Tensors>;

// Of many gradients at once, the pass is PyTorch's.
Gradients leave(at::TensorList, const Tensors&, at::TensorList, bool, bool, int64_t) { return {false, Tensors()}; }

// Sets the gradients below the roots, or gives those of the inputs. False where that is left to PyTorch's engine: then
// nothing has happened.
Gradients backward(at::TensorList roots, const Tensors& root_grads, at::TensorList inputs, bool keep_graph,
                   bool create_graph, int64_t overrides) {
  const Gradients left(false, Tensors());
  // Profilers see passes of PyTorch's engine.
  const bool observed = at::getStepCallbacksUnlessEmpty(at::RecordScope::BACKWARD_FUNCTION).has_value();
  if (torch::autograd::AnomalyMode::is_enabled() || observed) return left;
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
    if (!input.requires_grad()) return left;
    // The accumulator of a leaf that no op has used yet does not exist, and then the graph does not lead to it.
    const auto leaf = input.is_leaf();
    asked.emplace_back(leaf ? torch::autograd::impl::try_get_grad_accumulator(input) : input.grad_fn(),
                       leaf ? 0 : input.output_nr());
    if (!asked.back().is_valid()) return left;
  }
  const Overrides guard(overrides);
  torch::autograd::validate_outputs(edges, grads, [](const std::string& text) { return text; });
  const auto pass = make_node<Pass>(std::move(edges), std::move(grads), asked, keep_graph);
  edge_list sinks;
  if (!asked.empty()) sinks.push_back(pass->next_edge(0));
  torch::autograd::Engine::get_default_engine().execute({Edge(pass, 0)}, {Pass::token()}, keep_graph, create_graph,
                                                        /*accumulate_grad=*/sinks.empty(), sinks);
  Tensors captured;
  for (const auto& edge : asked) {
    const auto grad = pass->captured(edge);
    captured.push_back(grad.defined() ? std::optional(grad) : std::nullopt);
  }
  return {true, captured};
}

TORCH_LIBRARY(torch_tandem, m) {
  m.def(
      "backward(Tensor[] roots, Tensor?[] grads, Tensor[] inputs, bool keep_graph, bool create_graph, "
      "int overrides) -> (bool, Tensor?[])");
}
TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) { m.impl("backward", backward); }
TORCH_LIBRARY_IMPL(torch_tandem, Batched, m) { m.impl("backward", leave); }

}  // namespace

const torch::autograd::Node* running_node() { return running; }

}  // namespace tandem
