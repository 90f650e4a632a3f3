// A backward pass on the calling thread, with less overhead per node than PyTorch's engine.
//
// Nodes run in the engine's order, and gradients are accumulated in the same order and with the same operators, so the
// results are bitwise equal to the engine's. PyTorch's engine sees the whole pass as one node, and still does the work
// that is done once per pass: graph task, callbacks, thread-local state, warnings.
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
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/autograd_nodes.h"
#include "autograd/backward.h"
#include "autograd/windows.h"
#include "calls/function.h"
#include "device/device_type.h"

namespace tandem {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local const Node* running = nullptr;

// Whether nodes of this type are Python functions (torch::autograd::PyNode). Their type is recognized by its name,
// because the class is in libtorch_python, which the shim does not link.
bool is_python(const std::type_info& type) {
  thread_local ska::flat_hash_map<const std::type_info*, bool> known;
  const auto found = known.find(&type);
  if (found != known.end()) return found->second;
  return known.emplace(&type, std::strstr(type.name(), "PyNode") != nullptr).first->second;
}

// Whether code of the program runs in a node or its hooks. Hooks can be added during the pass, so this is checked
// immediately before the node runs.
bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr || is_python(typeid(node));
}

// A node that has not run yet.
struct Pending {
  Node* node;
  // Sums of the gradients that have arrived so far, one per input of the node.
  variable_list grads;
  // Number of incoming edges whose gradient has not arrived.
  int missing = 0;
  // Whether the node must run, because it leads to a requested gradient.
  bool needed = true;
  // Whether a gradient that arrives at this node is itself requested.
  bool captured = false;
  // Negative zeros of each sum. The list is empty if they may be anywhere in all of them.
  std::vector<NegativeZeros> zeros;
};

// The nodes on paths from the roots to the inputs, or all nodes reachable from the roots if there are no inputs.
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

  // Returns the node that an edge leads to, or null if its gradient is not needed.
  Pending* at(const Edge& edge) {
    const auto place = places_.find(edge.function.get());
    if (place == places_.end()) return nullptr;
    auto& next = pending_[place->second];
    return next.needed || next.captured || next.node == only_root_ ? &next : nullptr;
  }

  // Fills PyTorch's graph task with the nodes of this pass. For a pass with inputs, also tells it which nodes run and
  // which gradients are requested; without inputs, all nodes run. Nodes and hooks read the graph task.
  void tell_the_record(bool with_inputs) const {
    using torch::autograd::GraphTask;
    // Writing is safe: the graph task belongs to the running pass, and nothing reads it before the first node runs.
    auto& met = const_cast<std::unordered_set<Node*>&>(*torch::autograd::get_current_graph_task_nodes_in_graph());
    met.reserve(pending_.size());
    for (const auto& next : pending_)
      if (next.node != only_root_) met.insert(next.node);
    if (!with_inputs) return;
    auto& infos = const_cast<std::unordered_map<Node*, GraphTask::ExecInfo>&>(
        *torch::autograd::get_current_graph_task_exec_info());
    for (const auto& next : pending_) {
      auto& info = infos[next.node];
      info.needed_ = next.needed;
      if (next.captured) info.captures_ = std::make_unique<std::vector<GraphTask::ExecInfo::Capture>>();
    }
  }

 private:
  // Whether an edge can lead to an input. A node cannot lead to one if its topological number is below the numbers of
  // all inputs.
  bool leads_on(const Edge& edge) const { return edge.is_valid() && edge.function->topological_nr() >= least_; }

  // Counts an edge. The first edge that leads to a node also adds the node.
  void meet(const Edge& edge) {
    Node* node = edge.function.get();
    const auto [place, is_new] = places_.emplace(node, pending_.size());
    if (is_new) pending_.push_back({node, {}});
    pending_[place->second].missing++;
  }

  // Marks the nodes that are inputs, and clears `needed` of nodes that do not lead to an input.
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
  // The root, if there is exactly one. PyTorch's engine starts at a single root even if that node is not needed, and
  // does not list it among the nodes of the graph task.
  const Node* only_root_ = nullptr;
  ska::flat_hash_map<Node*, size_t> places_;
  std::vector<Pending> pending_;
};

// Whether a gradient can be accumulated into this tensor in place: nothing else refers to the tensor, and no graph is
// created.
bool is_ours(const at::Tensor& t) {
  return !c10::GradMode::is_enabled() && !at::isTensorSubclassLike(t) && t.is_non_overlapping_and_dense() &&
         !t._is_zerotensor() && t.use_count() == 1 && t.has_storage() && t.storage().use_count() == 1;
}

void add_up(at::Tensor& sum, at::Tensor&& grad) {
  if (!sum.defined())
    sum = std::move(grad);
  else if (is_ours(sum) && !at::isTensorSubclassLike(grad))
    sum.add_(grad);
  else
    sum = sum + grad;
}

// Adds a gradient that arrives at an input of a node.
void arrive(Pending& at, size_t input, at::Tensor&& grad, const NegativeZeros& zeros) {
  const auto inputs = at.node->num_inputs();
  if (at.grads.empty()) at.grads.resize(inputs);
  if (!grad.defined()) return;
  auto& sum = at.grads[input];
  if (!zeros.are_anywhere() && at.zeros.empty()) at.zeros.resize(inputs);
  if (!at.zeros.empty()) {
    if (sum.defined())
      at.zeros[input].added(zeros);
    else
      at.zeros[input] = zeros;
  }
  add_up(sum, std::move(grad));
}

// The same for a gradient that is `part` in a window, and 0.0 outside of it. Returns false if the whole gradient is
// needed; then nothing has been done.
bool arrive_in(Pending& at, size_t input, const Window& window, const at::Tensor& part) {
  return !at.zeros.empty() && is_ours(at.grads[input]) && !at::isTensorSubclassLike(part) &&
         at.zeros[input].add_in(at.grads[input], window, part);
}

// Order of the queue: nodes with the highest sequence number, which belong to the latest forward ops, run first. Nodes
// that accumulate gradients have the maximum number, and precede all other nodes.
struct Later {
  bool operator()(const Pending* a, const Pending* b) const { return a->node->sequence_nr() < b->node->sequence_nr(); }
};

// Sets the thread's running node for the lifetime of the object.
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
    auto done = grads.size() == 1 && is_ours(grads[0]) ? run_in_place(node, grads[0]) : std::nullopt;
    outputs = done ? std::move(*done) : node(std::move(grads));
  } else {
    // Post hooks receive the gradients that the node gets, so the node runs on a copy of the list. As in PyTorch's
    // engine, no copy is made if the node adds its first post hook while it runs.
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

// The thread-local state at the start of the pass. Code of the program may change the state, so it is restored before
// the next node. Copying all of the state takes about as long as a node, so it is done for nodes that run code of the
// program, and not for each pass.
class Surroundings {
 public:
  // Runs `body` and then restores the thread-local state.
  template <typename Body>
  void keep(Body&& body) const {
    const at::ThreadLocalStateGuard guard(at::ThreadLocalState{});
    body();
  }

  // Restores grad mode and the dispatch keys, which hooks on saved tensors can change.
  void check() const {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    if (C10_LIKELY(c10::GradMode::is_enabled() == grad_mode_ && keys.included_ == keys_.included_ &&
                   keys.excluded_ == keys_.excluded_))
      return;
    c10::GradMode::set_enabled(grad_mode_);
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }

 private:
  bool grad_mode_ = c10::GradMode::is_enabled();
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
};

// A requested input for PyTorch's engine, to which the pass has an edge. For the engine, it makes the pass a call of
// `grad()`, which nodes can see in the graph task.
struct Sink final : Node {
  Sink() : Node(uint64_t{0}) { add_input_metadata(undefined_input()); }
  variable_list apply(variable_list&&) override { return {}; }
};

// A whole backward pass, as one node of PyTorch's engine. The engine provides the state of the pass (its id, callbacks,
// thread-local state, warnings), and `apply` runs the nodes of the graph.
class Pass final : public Node {
 public:
  Pass(edge_list roots, variable_list grads, const edge_list& inputs, bool keep_graph)
      : Node(std::numeric_limits<uint64_t>::max()),
        graph_(roots, inputs),
        roots_(std::move(roots)),
        grads_(std::move(grads)),
        has_inputs_(!inputs.empty()),
        keep_graph_(keep_graph) {
    // The input is a CPU tensor, so the engine runs the node on the calling thread.
    add_input_metadata(token());
    if (has_inputs_) add_next_edge({make_node<Sink>(), 0});
  }

  // A CPU tensor that stands for the pass's gradient.
  static const at::Tensor& token() {
    static const at::Tensor token = at::detail::empty_cpu({}, at::TensorOptions(at::kFloat));
    return token;
  }

  // The name of the running node, for the engine's error messages.
  std::string name() const override { return current_ ? current_->name() : "Pass"; }

  variable_list apply(variable_list&&) override {
    graph_.tell_the_record(has_inputs_);
    surroundings_.emplace();
    {
      const Running guard(roots_.front().function.get());
      pass(roots_, grads_, 0, grads_.size());
    }
    grads_.clear();
    run_ready(0);
    return variable_list(num_outputs());
  }

  // Returns the gradient that has arrived at an edge, or an undefined tensor.
  at::Tensor captured(const Edge& edge) {
    const auto* end = graph_.at(edge);
    return end && !end->grads.empty() ? end->grads[edge.input_nr] : at::Tensor();
  }

 private:
  void count(Pending* next) {
    if (--next->missing == 0) ready_.push(next);
  }

  // Hands on the gradients of some edges. `zeros` are the negative zeros of the first one.
  void pass(const edge_list& edges, variable_list& grads, size_t from, size_t to, const NegativeZeros& zeros = {}) {
    for (size_t i = from; i < to; i++) {
      auto* next = graph_.at(edges[i]);
      if (!next) continue;
      arrive(*next, edges[i].input_nr, std::move(grads[i]), i == 0 ? zeros : NegativeZeros());
      count(next);
    }
  }

  // Hands on the gradients that a node has computed. After each step of a node that stands for several nodes, the leaves
  // whose gradients are complete come first, as they would after each of these nodes.
  void pass_outputs(Node& node, variable_list& grads, const NegativeZeros& zeros = {}) {
    const auto& edges = node.next_edges();
    const auto* several = grads.size() > 1 ? dynamic_cast<const StepwiseNode*>(&node) : nullptr;
    if (!several) return pass(edges, grads, 0, grads.size(), zeros);
    size_t from = 0;
    for (const size_t step : std::vector<size_t>(several->steps())) {
      pass(edges, grads, from, from + step);
      from += step;
      if (from < grads.size()) run_ready(std::numeric_limits<uint64_t>::max());
    }
    pass(edges, grads, from, grads.size());
  }

  // Runs the nodes that are ready and have at least the sequence number `least`.
  void run_ready(uint64_t least) {
    while (!ready_.empty() && ready_.top()->node->sequence_nr() >= least) {
      auto& next = *ready_.top();
      ready_.pop();
      auto& node = *next.node;
      current_ = &node;
      const Running guard(&node);
      variable_list outputs;
      if (is_watched(node)) {
        surroundings_->keep([&] { outputs = evaluate(next); });
        pass_outputs(node, outputs);
        continue;
      }
      const auto window = Window::of(node);
      if (auto* whole = window ? add_in_whole(next, *window) : nullptr) {
        count(whole);
        continue;
      }
      const auto zeros = window               ? NegativeZeros(*window)
                         : next.zeros.empty() ? NegativeZeros()
                                              : NegativeZeros::after(node, next.zeros[0]);
      outputs = evaluate(next);
      surroundings_->check();
      pass_outputs(node, outputs, zeros);
    }
  }

  variable_list evaluate(Pending& next) {
    if (!next.needed) {
      next.grads = call_tensor_hooks(*next.node, std::move(next.grads));
      return {};
    }
    auto arrived = next.captured ? next.grads : std::move(next.grads);
    return run(*next.node, std::move(arrived), keep_graph_);
  }

  // Adds the gradient that the node of a window would compute. Returns the node that it leads to, or null if the node of
  // the window has to run.
  Pending* add_in_whole(Pending& next, const Window& window) {
    if (!next.needed || next.captured || !next.grads[0].defined()) return nullptr;
    const auto& edge = next.node->next_edge(0);
    auto* whole = graph_.at(edge);
    return whole && arrive_in(*whole, edge.input_nr, window, next.grads[0]) ? whole : nullptr;
  }

  Graph graph_;
  edge_list roots_;
  variable_list grads_;
  bool has_inputs_;
  bool keep_graph_;
  Node* current_ = nullptr;
  std::optional<Surroundings> surroundings_;
  std::priority_queue<Pending*, std::vector<Pending*>, Later> ready_;
};

// Restores the program's `__torch_function__` state for the nodes of the pass. The state is off while the operator that
// starts the pass is called, so that overrides do not see the operator.
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

// Runs a pass. Returns the gradients of `inputs`. Without inputs, accumulates the gradients of all leaves.
variable_list execute(edge_list&& roots, variable_list&& grads, const edge_list& inputs, bool keep_graph,
                      bool create_graph) {
  const auto pass = make_node<Pass>(std::move(roots), std::move(grads), inputs, keep_graph);
  edge_list sinks;
  if (!inputs.empty()) sinks.push_back(pass->next_edge(0));
  torch::autograd::Engine::get_default_engine().execute({Edge(pass, 0)}, {Pass::token()}, keep_graph, create_graph,
                                                        /*accumulate_grad=*/sinks.empty(), sinks);
  variable_list found;
  for (const auto& input : inputs) found.push_back(pass->captured(input));
  return found;
}

using Tensors = c10::List<std::optional<at::Tensor>>;
using Gradients = std::tuple<bool, Tensors>;

// Batched gradients (vmap) are left to PyTorch's engine.
Gradients leave(at::TensorList, const Tensors&, at::TensorList, bool, bool, int64_t) { return {false, Tensors()}; }

// Runs a backward pass. Returns the gradients of `inputs`. Without inputs, accumulates the gradients of all leaves. The
// first result is false if the pass is left to PyTorch's engine; then nothing has been done.
Gradients backward(at::TensorList roots, const Tensors& root_grads, at::TensorList inputs, bool keep_graph,
                   bool create_graph, int64_t overrides) {
  const Gradients left(false, Tensors());
  // Only PyTorch's engine reports nodes to a profiler.
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
  if (C10_UNLIKELY(is_recording) && !keep_graph)
    for (const auto& root : edges) note_consumed(root);
  for (const auto& input : inputs) {
    if (!input.requires_grad() || input.device().type() != kTandem) return left;
    // A leaf without an accumulator has not been used by any op, so the graph does not lead to it.
    const auto leaf = input.is_leaf();
    asked.emplace_back(leaf ? torch::autograd::impl::try_get_grad_accumulator(input) : input.grad_fn(),
                       leaf ? 0 : input.output_nr());
    if (!asked.back().is_valid()) return left;
  }
  const Overrides guard(overrides);
  torch::autograd::validate_outputs(edges, grads, [](const std::string& text) { return text; });
  Tensors captured;
  for (auto& grad : execute(std::move(edges), std::move(grads), asked, keep_graph, create_graph))
    captured.push_back(grad.defined() ? std::optional(std::move(grad)) : std::nullopt);
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

bool runs_program(torch::autograd::Node& node) { return is_watched(node); }

variable_list run_within(edge_list roots, variable_list grads, const edge_list& inputs) {
  return execute(std::move(roots), std::move(grads), inputs, /*keep_graph=*/true, c10::GradMode::is_enabled());
}

}  // namespace tandem
