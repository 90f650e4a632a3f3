#include "functions/call_backward.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "autograd/autograd_nodes.h"
#include "autograd/backward.h"
#include "calls/function.h"
#include "device/storage.h"

namespace tandem {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Hands a gradient on. Passes that do not begin at the call's node reach the graph of the call through these nodes.
struct Gate final : Node {
  Gate(uint64_t sequence, const Edge& target) : Node(sequence, {target}) {
    // The target may accept gradients of another device or shape than its tensor's.
    const auto& accepted = target.function->input_metadata(target.input_nr);
    add_input_metadata(accepted.options(), accepted.shape_as_dim_vector(), accepted.is_tensor_subclass(),
                       accepted.is_nested_tensor(), accepted.grad_dtype());
  }
  variable_list apply(variable_list&& grads) override { return std::move(grads); }
};

// Removes the edges of gates, so that a pass ends at the gates. The destructor restores the edges.
class Closed {
 public:
  explicit Closed(const Cut& graph) : graph_(graph) {
    for (const auto& gate : graph_.gates) gate->next_edges().clear();
  }
  ~Closed() {
    for (size_t i = 0; i < graph_.gates.size(); i++) graph_.gates[i]->next_edges() = {graph_.targets[i]};
  }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;

 private:
  const Cut& graph_;
};

// Runs the backward pass of a graph. Returns the gradients at its gates.
variable_list run(const Cut& graph, const variable_list& grads) {
  edge_list roots, ends;
  variable_list defined;
  for (size_t i = 0; i < grads.size(); i++) {
    if (!grads[i].defined()) continue;
    roots.push_back(graph.roots[i]);
    defined.push_back(grads[i]);
  }
  if (roots.empty()) return variable_list(graph.gates.size());
  for (const auto& gate : graph.gates) ends.emplace_back(gate, 0);
  const Closed closed(graph);
  return run_within(std::move(roots), std::move(defined), ends);
}

// Storages that existed before a pass, each with a watched tensor of the call on the storage. A storage has several of
// them if tensors with versions of their own share it.
using Captured = std::vector<std::pair<size_t, size_t>>;

// In place of a recorded pass: a pass that creates a graph, and passes of a call that was opened.
constexpr int64_t kCreatesGraph = -1, kOpened = -2;

// The backward passes of a recorded call.
struct Passes {
  Passes() = default;
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;
  ~Passes() {
    for (const int64_t pass : recorded)
      if (pass >= 0) drop_recording(pass);
    for (const auto& [pass, _] : templates) drop_recording(pass);
  }

  // Passes that have been recorded since Python has last asked for them, or negative numbers for what keeps all passes of
  // the call from being replayed.
  std::vector<int64_t> recorded;
  // Passes that are templates.
  std::vector<std::pair<int64_t, Captured>> templates;
  // The storages that templates use, by their numbers among the lasting storages that the call has made.
  std::unordered_set<size_t> saved;
};

std::mutex passes_mutex;
// Passes by the number of the recorded call. Nodes of replayed calls hold them too. The map is never destroyed, because
// at the end of the process Rust's part may be gone.
auto& passes = *new std::unordered_map<int64_t, std::shared_ptr<Passes>>();

std::shared_ptr<Passes> passes_of(int64_t call) {
  auto& known = passes[call];
  if (!known) known = std::make_shared<Passes>();
  return known;
}

void note_pass(int64_t call, int64_t pass) {
  if (!find_recorded(call)) {
    if (pass >= 0) drop_recording(pass);
    return;
  }
  const std::lock_guard<std::mutex> lock(passes_mutex);
  passes_of(call)->recorded.push_back(pass);
}

std::vector<int64_t> take_passes(int64_t call) {
  const std::lock_guard<std::mutex> lock(passes_mutex);
  const auto found = passes.find(call);
  return found == passes.end() ? std::vector<int64_t>() : std::exchange(found->second->recorded, {});
}

// Lets replays of the call use a recorded pass, whose template Rust has. The pass is dropped with the last of these
// replays.
void add_pass(int64_t call, int64_t pass) {
  const auto forward = find_recorded(call), backward = find_recorded(pass);
  if (!forward || !backward) return;
  Captured captured;
  const std::lock_guard<std::mutex> lock(passes_mutex);
  const auto known = passes_of(call);
  for (size_t i = 0; i < backward->given.size(); i++) {
    const auto& given = backward->given[i];
    if (given.kind == Given::kSaved) known->saved.insert(given.index);
    if (given.kind != Given::kCaptured) continue;
    for (size_t j = 0; j < forward->watched.size(); j++)
      if (forward->watched[j].context == given.context) captured.emplace_back(i, j);
  }
  known->templates.emplace_back(pass, std::move(captured));
}

void drop_passes(int64_t call) {
  std::shared_ptr<Passes> dropped;
  const std::lock_guard<std::mutex> lock(passes_mutex);
  const auto found = passes.find(call);
  if (found == passes.end()) return;
  dropped = std::move(found->second);
  passes.erase(found);
}

// Whether two passes differ in their gradients and arguments, or in PyTorch's settings.
bool differ_in_inputs(int64_t one, int64_t two) {
  const auto a = find_recorded(one), b = find_recorded(two);
  if (!a || !b || !(a->modes == b->modes)) return true;
  const auto same = [](const Argument& x, const Argument& y) { return x.equals(y, false); };
  return !std::equal(a->arguments.begin(), a->arguments.end(), b->arguments.begin(), b->arguments.end(), same);
}

// A tensor without a graph on the elements of `t`, which counts writes with it.
at::Tensor alias_of(const at::Tensor& t) {
  const TensorMetadata metadata(t);
  auto alias = window(t.storage(), metadata.record(t.storage_offset()));
  alias.unsafeGetTensorImpl()->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  return alias;
}

// The node of a call whose results require grad.
class CallBackward : public StepwiseNode {
 public:
  CallBackward(std::vector<Cut::Roots> joint, std::vector<size_t> steps)
      : joint_(std::move(joint)), steps_(std::move(steps)) {
    // A pass that asks for gradients skips nodes whose topological number is not above that of a requested node. `open`
    // puts a graph of unknown depth behind this node, so its number is above all others.
    if (has_several_results()) topological_nr_ = uint64_t{1} << 32;
  }

  std::string name() const override { return "TandemFunctionBackward"; }
  const std::vector<size_t>& steps() const override { return steps_; }
  // Frees what the latest pass has used.
  void release_variables() override { freed_ |= latest_; }

  // Adds a result from which a pass may begin. One of several views becomes a view here too, of a base of its own.
  void add_root(const NodePointer& self, const at::Tensor& t, torch::autograd::CreationMeta creation) {
    if (creation != torch::autograd::CreationMeta::DEFAULT && !t.is_view()) {
      const auto base = alias_of(t);
      torch::autograd::as_view(base, t, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/true,
                               /*view_func=*/nullptr, /*rev_view_func=*/nullptr, creation);
    }
    torch::autograd::impl::set_gradient_edge(t, {self, add_input_metadata(t)});
    if (has_several_results()) results_.emplace_back(t);
  }

  // Makes the results belong to the graph of the call. The node gives a result only the gradients from outside of the
  // call, and all results theirs at once. Hooks and passes that ask for the gradient of one need also what other results
  // add to it, and are not called for a result that has none.
  void open() {
    if (!has_several_results() || is_open_ || freed_ != 0) return;
    // A pass that is to run the node knows its edges.
    const auto* running = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (running && running->count(this)) return;
    auto roots = lead_on();
    for (size_t i = 0; i < roots.size(); i++) {
      auto impl = results_[i].lock();
      if (!impl) continue;
      // A result that was changed in place leads to the node through other nodes.
      const at::Tensor t(std::move(impl));
      if (t.grad_fn().get() == this && t.output_nr() == i) torch::autograd::impl::set_gradient_edge(t, roots[i]);
    }
    next_edges() = std::move(roots);
    is_open_ = true, latest_ = 0, steps_.clear();
  }

 protected:
  // Returns the edges to the graph of the call, and forgets what the node needed instead.
  virtual edge_list lead_on() = 0;

  static Cut::Roots roots_of(const variable_list& grads) {
    Cut::Roots roots = 0;
    for (size_t i = 0; i < grads.size(); i++)
      if (grads[i].defined()) roots |= Cut::only(i);
    return roots;
  }

  // Whether passes from all results have freed their graph.
  bool is_freed() const {
    for (size_t i = 0; i < joint_.size(); i++)
      if (!(freed_ & Cut::only(i))) return false;
    return true;
  }

  // Whether the latest pass, or one from these results, reaches nodes of passes that have freed their graph.
  bool needs_freed() const { return needs_freed(latest_); }
  bool needs_freed(Cut::Roots roots) const {
    for (size_t i = 0; i < joint_.size(); i++)
      if ((roots & Cut::only(i)) && (joint_[i] & freed_)) return true;
    return false;
  }

  // The results from which the latest pass began, and those of passes that have freed their graph.
  Cut::Roots latest_ = 0, freed_ = 0;
  // Whether the node hands gradients on to the graph of the call.
  bool is_open_ = false;

 private:
  bool has_several_results() const { return joint_.size() > 1; }

  // For each result, the results with which it shares nodes.
  std::vector<Cut::Roots> joint_;
  std::vector<size_t> steps_;
  // The results, if there are several.
  std::vector<WeakTensor> results_;
};

// Clones gradients of leaves that share memory with other gradients of this pass. Autograd keeps the gradient of a leaf
// without a copy if nothing else refers to the tensor and its strides are the leaf's. It would not keep these: its nodes
// run one by one, so when the leaf is reached, a later node still refers to the shared memory. Here no node is left.
void separate(variable_list& grads, const edge_list& targets) {
  std::unordered_map<const void*, std::vector<size_t>> on;
  for (size_t i = 0; i < grads.size(); i++)
    if (grads[i].defined() && grads[i].layout() == c10::kStrided && grads[i].numel() > 0)
      on[identity(grads[i])].push_back(i);
  for (const auto& [_, all] : on) {
    for (size_t k = 0; k + 1 < all.size(); k++) {
      auto& grad = grads[all[k]];
      const auto overlaps = [&](size_t other) {
        return !grads[other].is_same(grad) && may_overlap(grads[other], grad);
      };
      const auto* leaf = dynamic_cast<AccumulateGrad*>(&*targets[all[k]].function);
      if (leaf && torch::autograd::utils::obeys_layout_contract(grad, leaf->variable) &&
          std::any_of(all.begin() + k + 1, all.end(), overlaps))
        grad = grad.clone();
    }
  }
}

// Makes expanded gradients dense. Returns whether there was one.
bool make_dense(variable_list& grads) {
  bool any = false;
  for (auto& grad : grads) {
    if (!grad.defined() || grad.layout() != c10::kStrided || grad.numel() <= 1) continue;
    const auto strides = grad.strides();
    if (std::find(strides.begin(), strides.end(), 0) == strides.end()) continue;
    grad = grad.contiguous();
    any = true;
  }
  return any;
}

class RecordedBackward final : public CallBackward {
 public:
  RecordedBackward(int64_t call, Cut&& graph, Surroundings&& around)
      : CallBackward(joint_roots(graph), graph.steps),
        call_(call),
        graph_(std::move(graph)),
        around_(std::move(around)) {
    set_next_edges(edge_list(graph_.targets));
  }

  variable_list apply(variable_list&& grads) override {
    if (is_open_) return std::move(grads);
    latest_ = roots_of(grads);
    if (needs_freed()) {
      if (creates_graph_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
      // The nodes of the call know whether they need what has been freed.
      return tandem::run(graph_, grads);
    }
    if (c10::GradMode::is_enabled()) {
      creates_graph_ = true;
      note_pass(call_, kCreatesGraph);
      return tandem::run(graph_, grads);
    }
    auto found = record(grads);
    record_others(grads);
    separate(found, next_edges());
    return found;
  }

  void release_variables() override {
    if (is_open_) return;
    CallBackward::release_variables();
    // If a pass has created a graph, that graph leads to the nodes, which the engine may still have to run.
    for (size_t i = 0; i < graph_.nodes.size() && !creates_graph_; i++)
      if (graph_.reached_from[i] & latest_) graph_.nodes[i]->release_variables();
    if (creates_graph_ && is_freed()) graph_ = Cut();
    if (is_freed()) around_ = Surroundings();
  }

 private:
  // Number of results up to which passes from some of them are recorded beside the program's passes.
  static constexpr size_t kFewResults = 3;

  // Records passes that the program may make of a later call: from other results, or with a dense gradient where this
  // one is expanded, as the gradient of a sum is.
  void record_others(const variable_list& grads) {
    // The program has not asked for these passes, so it does not see their errors.
    if (torch::autograd::AnomalyMode::is_enabled()) return;
    const auto try_to_record = [&](const variable_list& others) {
      try {
        record(others);
      } catch (const std::exception&) {
      }
    };
    if (auto dense = grads; make_dense(dense)) try_to_record(dense);
    if (grads.size() > kFewResults) return;
    for (Cut::Roots roots = 1; roots < Cut::only(grads.size()); roots++) {
      if (roots == latest_ || needs_freed(roots)) continue;
      variable_list some(grads.size());
      for (size_t i = 0; i < grads.size(); i++)
        if (roots & Cut::only(i)) some[i] = grads[i].defined() ? grads[i] : input_metadata(i).zeros_like();
      try_to_record(some);
      if (make_dense(some)) try_to_record(some);
    }
  }

  // Runs the graph, and records the pass if that is possible now.
  variable_list record(const variable_list& grads) {
    auto arguments = grads;
    arguments.insert(arguments.end(), around_.arguments.begin(), around_.arguments.end());
    std::vector<at::Tensor> reached;
    for (const auto& t : around_.reached)
      if (auto impl = t.lock()) reached.emplace_back(std::move(impl));
    for (size_t i = 0; i < around_.saved.size(); i++)
      if (const auto& result = around_.results[i]; result && result->expired()) around_.saved[i] = nullptr;
    if (!begin_recording_backward(arguments, reached, around_.saved)) return tandem::run(graph_, grads);
    try {
      auto found = tandem::run(graph_, grads);
      note_pass(call_, end_recording(found));
      return found;
    } catch (...) {
      cancel_recording();
      throw;
    }
  }

  edge_list lead_on() override {
    note_pass(call_, kOpened);
    around_ = Surroundings();
    return std::exchange(graph_, Cut()).roots;
  }

  int64_t call_;
  Cut graph_;
  Surroundings around_;
  bool creates_graph_ = false;
};

const char* const kModified =
    "one of the variables needed for gradient computation has been modified by an inplace operation, after a replayed "
    "call of a torch_tandem.function had used it";

class ReplayedBackward final : public CallBackward {
 public:
  explicit ReplayedBackward(Left&& left)
      : CallBackward(left.call->joint_roots, left.call->steps), left_(std::move(left)) {
    for (const auto& target : left_.call->targets) {
      const auto& t = (target.is_argument ? left_.arguments : left_.watched)[target.index];
      add_next_edge(torch::autograd::impl::gradient_edge(t));
      can_replay_ &= accepts_shape_of(t, next_edge(num_outputs() - 1));
    }
    // Nodes of later calls have greater sequence numbers than those of this call, if it is made again.
    for (uint64_t i = 0; i < left_.call->nodes; i++) at::sequence_number::get_and_increment();
    for (const auto& t : left_.arguments) arguments_.push_back({identity(t), t.defined() ? version_of(t) : 0});
    for (const auto& t : left_.watched) watched_.push_back(Version::of(t));
    for (const auto& fed : left_.call->fed) fed_.push_back(Version::of(fed.version));
    const std::lock_guard<std::mutex> lock(passes_mutex);
    passes_ = passes_of(left_.id);
    for (size_t i = 0; i < left_.made.size(); i++)
      if (!passes_->saved.count(i)) left_.made[i].reset();
    for (const auto& [pass, captured] : passes_->templates)
      if (const auto recorded = find_recorded(pass))
        for (const auto& [given, _] : captured) captured_.push_back(recorded->given[given].storage.lock());
    // Only the recording refers to the watched tensors, weakly.
    left_.watched.clear();
  }

  // Notes the version of a result. `storage` is the number of its storage among the storages that the call has made.
  void note_result(const at::Tensor& t, size_t storage) { results_.push_back({storage, Version::of(t)}); }

  variable_list apply(variable_list&& grads) override {
    if (is_open_) return std::move(grads);
    latest_ = roots_of(grads);
    if (needs_freed() && (!passes_ || uses_saved(latest_)))
      throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
    note_refusal("it runs the backward pass of a replayed call of another function");
    if (can_replay_ && !c10::GradMode::is_enabled()) {
      // Operators may have other bits for gradients with other strides.
      for (const bool exactly : {true, false}) {
        if (!exactly && may_be_made_again()) break;
        for (const auto& [pass, captured] : passes_->templates)
          if (auto found = replay(pass, captured, grads, exactly)) {
            separate(*found, next_edges());
            return std::move(*found);
          }
      }
    }
    return tandem::run(graph_again(), grads);
  }

  void release_variables() override {
    if (is_open_) return;
    CallBackward::release_variables();
    if (!is_freed() || !passes_) return;
    left_.made.clear(), captured_.clear();
    if (may_run_again()) {
      for (auto& t : left_.arguments) t.reset();
      has_arguments_ = false;
      return;
    }
    forget();
  }

 private:
  // The recordings refer to tensors, weakly. PyTorch swaps no tensors that have such references.
  void forget() { left_ = Left(), passes_.reset(), captured_.clear(); }

  edge_list lead_on() override {
    auto roots = graph_again().roots;
    forget();
    return roots;
  }

  // The version of a tensor when the call ended.
  struct Version {
    static Version of(const c10::VariableVersion& counter) {
      return {counter, counter.enabled() ? counter.current_version() : 0};
    }
    static Version of(const at::Tensor& t) { return of(t.unsafeGetTensorImpl()->version_counter()); }
    bool is_current() const { return !counter.enabled() || counter.current_version() == version; }
    c10::VariableVersion counter;
    uint32_t version;
  };

  // A result, and the number of its storage among the storages that the call has made.
  struct OfResult {
    size_t storage;
    Version version;
  };

  // Whether the recorded pass uses more than the gradients that it is given. Only then do nodes of autograd save what
  // they free.
  bool uses_saved(const Recorded& pass) const {
    const auto is_saved = [&](const Given& given) {
      return given.kind != Given::kArgument || given.index >= num_inputs();
    };
    const auto is_saved_host = [](const Fed& fed) { return !fed.is_number || fed.is_kept; };
    const auto is_argument = [&](const Result& result) {
      return (result.kind == Result::kArgument || result.kind == Result::kOnArgument) && result.index >= num_inputs();
    };
    return std::any_of(pass.given.begin(), pass.given.end(), is_saved) ||
           std::any_of(pass.fed.begin(), pass.fed.end(), is_saved_host) ||
           std::any_of(pass.results.begin(), pass.results.end(), is_argument);
  }

  // Whether a pass from these results uses what earlier passes have freed. If no pass from exactly these results was
  // recorded, the recorded passes from other results decide.
  bool uses_saved(Cut::Roots roots) const {
    bool is_used = false;
    for (const auto& [number, _] : passes_->templates) {
      const auto pass = find_recorded(number);
      if (!pass) return true;
      Cut::Roots from = 0;
      for (uint32_t i = 0; i < num_inputs(); i++)
        if (pass->arguments[i].defined) from |= Cut::only(i);
      if (from == roots) return uses_saved(*pass);
      is_used |= uses_saved(*pass);
    }
    return is_used;
  }

  // Whether a pass remains possible when all have freed their graph.
  bool may_run_again() const {
    return std::any_of(passes_->templates.begin(), passes_->templates.end(), [&](const auto& known) {
      const auto pass = find_recorded(known.first);
      return pass && !uses_saved(*pass);
    });
  }

  // Replays a recorded pass. Returns nothing if the pass is not of its kind: if `exactly`, the gradients must have the
  // strides of the recorded ones.
  std::optional<variable_list> replay(int64_t pass, const Captured& captured, const variable_list& grads, bool exactly);
  bool may_be_made_again() const;
  c10::List<std::optional<at::Tensor>> arguments_of_call() const;
  // Runs Python again, for a pass that has not been recorded. Returns the graph of the call.
  Cut graph_again();
  // Whether a tensor has the elements that it had when the call ended. If its storage was replaced (`.data`), the nodes of
  // autograd would use the new elements if they have saved the tensor, and the old ones if they have saved a view of it.
  bool is_as_before(size_t argument) const {
    const auto& t = left_.arguments[argument];
    return !t.defined() || (identity(t) == arguments_[argument].first && version_of(t) == arguments_[argument].second);
  }
  // Whether the arguments that share the storage of an argument have the elements that they had when the call ended.
  bool is_shared_as_before(size_t argument) const {
    for (size_t i = 0; i < left_.arguments.size(); i++)
      if (arguments_[i].first == arguments_[argument].first && !is_as_before(i)) return false;
    return is_as_before(argument);
  }
  // Whether a host tensor that a pass is fed is unchanged, if the call was fed it, too.
  bool is_as_before(const Fed& fed, size_t gradients) const {
    if (fed.kind == Fed::kArgument) return fed.index < gradients || is_shared_as_before(fed.index - gradients);
    if (fed.kind != Fed::kCaptured) return true;
    const auto& known = left_.call->fed;
    for (size_t i = 0; i < known.size(); i++)
      if (known[i].kind == Fed::kCaptured && known[i].storage == fed.storage && !fed_[i].is_current()) return false;
    return true;
  }
  bool is_as_before(size_t watched, const Given& given) const {
    if (!watched_[watched].is_current()) return false;
    const auto& known = left_.call->watched[watched];
    auto impl = known.tensor.lock();
    if (!impl) return true;
    const at::Tensor now(std::move(impl));
    auto storage = given.storage.lock();
    if (known.is_same(now) || !storage) return true;
    return known.window.is_of(now) &&
           at::equal(window(c10::Storage(std::move(storage)), known.window.record(known.offset)), now.detach());
  }

  Left left_;
  std::shared_ptr<Passes> passes_;
  // Whether the gradients have the shapes that autograd accepts.
  bool can_replay_ = true;
  // Whether the arguments are kept. Passes that use none of them may run after all have freed their graph.
  bool has_arguments_ = true;
  // The storages of the call's arguments, and their versions when the call ended.
  std::vector<std::pair<void*, uint32_t>> arguments_;
  std::vector<Version> watched_;
  // Versions of the host tensors that the call was fed.
  std::vector<Version> fed_;
  std::vector<OfResult> results_;
  // Storages of watched tensors that the passes use.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> captured_;
};

std::optional<variable_list> ReplayedBackward::replay(int64_t pass, const Captured& captured,
                                                      const variable_list& grads, bool exactly) {
  const auto recorded = find_recorded(pass);
  if (!recorded || (!has_arguments_ && uses_saved(*recorded))) return std::nullopt;
  auto arguments = grads;
  for (size_t i = 0; i < grads.size(); i++) {
    const auto& known = recorded->arguments[i];
    if (grads[i].defined() != known.defined) return std::nullopt;
    if (!known.defined) continue;
    if (grads[i].layout() != c10::kStrided) return std::nullopt;
    if (known.window->is_of(grads[i])) continue;
    if (exactly) return std::nullopt;
    // Recorded gradients may be expanded.
    const bool is_dense = c10::IntArrayRef(known.window->strides).empty() ||
                          *std::min_element(known.window->strides.begin(), known.window->strides.end()) > 0;
    if (!is_dense || grads[i].sizes() != c10::IntArrayRef(known.window->sizes) ||
        grads[i].scalar_type() != known.window->dtype)
      return std::nullopt;
    arguments[i] = at::empty_strided(known.window->sizes, known.window->strides, grads[i].options()).copy_(grads[i]);
  }
  arguments.insert(arguments.end(), left_.arguments.begin(), left_.arguments.end());
  return replay_backward(pass, std::move(arguments), left_.made, [&] {
    for (const auto& given : recorded->given) {
      bool is_modified = false;
      if (given.kind == Given::kArgument && given.index >= grads.size()) {
        is_modified = !is_shared_as_before(given.index - grads.size());
      } else if (given.kind == Given::kSaved) {
        is_modified = std::any_of(results_.begin(), results_.end(), [&](const OfResult& result) {
          return result.storage == given.index && !result.version.is_current();
        });
      }
      if (is_modified) throw std::runtime_error(kModified);
    }
    for (const auto& fed : recorded->fed)
      if (!is_as_before(fed, grads.size())) throw std::runtime_error(kModified);
    for (const auto& [given, watched] : captured)
      if (!is_as_before(watched, recorded->given[given])) throw std::runtime_error(kModified);
  });
}

bool ReplayedBackward::may_be_made_again() const {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_tandem::may_recompute", "")
                             .typed<bool(int64_t, const c10::List<std::optional<at::Tensor>>&)>();
  return has_arguments_ && op.call(left_.id, arguments_of_call());
}

c10::List<std::optional<at::Tensor>> ReplayedBackward::arguments_of_call() const {
  c10::List<std::optional<at::Tensor>> arguments;
  for (const auto& t : left_.arguments) arguments.push_back(t.defined() ? std::optional(t) : std::nullopt);
  return arguments;
}

Cut ReplayedBackward::graph_again() {
  if (!has_arguments_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
  for (size_t i = 0; i < left_.arguments.size(); i++)
    if (!is_as_before(i)) throw std::runtime_error(kModified);
  for (const auto& fed : left_.call->fed)
    if (!is_as_before(fed, 0)) throw std::runtime_error(kModified);
  for (const auto& result : results_)
    if (passes_ && passes_->saved.count(result.storage) && !result.version.is_current())
      throw std::runtime_error(kModified);
  const auto& watched = left_.call->watched;
  for (size_t i = 0; i < watched.size(); i++) {
    const auto impl = watched[i].tensor.lock();
    if (!watched_[i].is_current() || !watched[i].is_same(at::Tensor(impl))) throw std::runtime_error(kModified);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_tandem::recompute", "")
                             .typed<std::vector<at::Tensor>(int64_t, const c10::List<std::optional<at::Tensor>>&)>();
  auto graph = [&] {
    // The call is made again with the settings that it had. The pass has the present ones, as in eager.
    const c10::InferenceMode outside(false);
    const ModesOfProcess modes(left_.call->modes);
    const auto first = at::sequence_number::peek();
    const auto all = op.call(left_.id, arguments_of_call());
    TORCH_CHECK(all.size() == left_.call->results.size(), "the function returned another number of tensors");
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < all.size(); i++) {
      if (!left_.call->results[i].requires_grad || left_.call->results[i].kind != Result::kKept) continue;
      TORCH_CHECK(all[i].requires_grad(), "a result of the function no longer requires grad");
      results.push_back(all[i]);
    }
    auto made = cut_out(results, left_.arguments, first);
    // The nodes run as if they had been made by the replayed call.
    const auto renumber = [&](const NodePointer& node) {
      node->set_sequence_nr(sequence_nr() + 1 + node->sequence_nr() - first);
    };
    std::for_each(made.nodes.begin(), made.nodes.end(), renumber);
    std::for_each(made.gates.begin(), made.gates.end(), renumber);
    return made;
  }();
  const auto same = [](const Edge& a, const Edge& b) { return a.function == b.function && a.input_nr == b.input_nr; };
  TORCH_CHECK(graph.refusal.empty() && std::equal(graph.targets.begin(), graph.targets.end(), next_edges().begin(),
                                                  next_edges().end(), same),
              "tandem: a function did not do again what its replayed call had done, so the call has no backward pass");
  return graph;
}

}  // namespace

namespace {

// The roots from which each node of a graph is reached. `nodes` are the graph's.
std::vector<Cut::Roots> roots_reaching(const Cut& graph, const std::unordered_set<Node*>& nodes) {
  std::unordered_map<Node*, Cut::Roots> reached;
  for (size_t i = 0; i < graph.roots.size(); i++) {
    std::vector<Node*> open = {&*graph.roots[i].function};
    while (!open.empty()) {
      auto* node = open.back();
      open.pop_back();
      if (!nodes.count(node) || (reached[node] & Cut::only(i))) continue;
      reached[node] |= Cut::only(i);
      for (const auto& edge : node->next_edges())
        if (edge.is_valid()) open.push_back(&*edge.function);
    }
  }
  std::vector<Cut::Roots> of_nodes;
  for (const auto& node : graph.nodes) of_nodes.push_back(reached[&*node]);
  return of_nodes;
}

}  // namespace

std::vector<Cut::Roots> joint_roots(const Cut& graph) {
  std::vector<Cut::Roots> joint(graph.roots.size());
  for (const auto from : graph.reached_from)
    for (size_t i = 0; i < joint.size(); i++)
      if (from & Cut::only(i)) joint[i] |= from;
  return joint;
}

bool accepts_shape_of(const at::Tensor& t, const Edge& edge) {
  return edge.function->input_metadata(edge.input_nr).shape_as_dim_vector() == t.sym_sizes();
}

Cut cut_out(at::TensorList results, at::TensorList arguments, uint64_t first) {
  Cut graph;
  std::unordered_set<Node*> met;
  std::vector<NodePointer> open;
  for (const auto& t : results) {
    graph.roots.push_back(torch::autograd::impl::gradient_edge(t));
    open.push_back(graph.roots.back().function);
  }
  struct Exit {
    NodePointer node;
    size_t edge;
  };
  std::vector<Exit> exits;
  const auto argument_at = [&](const Edge& edge) {
    return std::find_if(arguments.begin(), arguments.end(), [&](const at::Tensor& t) {
      return t.defined() && t.requires_grad() && t.grad_fn() == edge.function && t.output_nr() == edge.input_nr;
    });
  };
  while (!open.empty()) {
    const auto node = std::move(open.back());
    open.pop_back();
    if (!met.insert(&*node).second) continue;
    if (node->sequence_nr() < first || dynamic_cast<AccumulateGrad*>(&*node)) {
      graph.refusal =
          "a result belongs to a graph of autograd from outside of the call. Pass the tensors of that graph as "
          "arguments";
      return graph;
    }
    if (runs_program(*node)) {
      graph.refusal = "its backward pass would run Python code (an autograd.Function, or a hook) outside of the call";
      return graph;
    }
    graph.nodes.push_back(node);
    const auto& edges = node->next_edges();
    for (size_t i = 0; i < edges.size(); i++) {
      if (!edges[i].is_valid()) continue;
      if (dynamic_cast<AccumulateGrad*>(&*edges[i].function) || argument_at(edges[i]) != arguments.end())
        exits.push_back({node, i});
      else
        open.push_back(edges[i].function);
    }
  }
  graph.reached_from = roots_reaching(graph, met);
  // Sorts the edges in the order in which their nodes run.
  std::stable_sort(exits.begin(), exits.end(),
                   [](const Exit& a, const Exit& b) { return a.node->sequence_nr() > b.node->sequence_nr(); });
  const Node* last = nullptr;
  for (const auto& exit : exits) {
    if (std::exchange(last, &*exit.node) != &*exit.node) graph.steps.push_back(0);
    graph.steps.back()++;
    auto& edge = exit.node->next_edges()[exit.edge];
    graph.targets.push_back(edge);
    graph.gates.push_back(make_node<Gate>(exit.node->sequence_nr(), edge));
    edge = Edge(graph.gates.back(), 0);
  }
  return graph;
}

std::vector<at::Tensor> attach_recorded(int64_t id, Cut&& graph, Surroundings&& around, at::TensorList results,
                                        c10::ArrayRef<torch::autograd::CreationMeta> creations) {
  const auto made = make_node<RecordedBackward>(id, std::move(graph), std::move(around));
  const NodePointer node = made;
  std::vector<at::Tensor> attached;
  for (size_t i = 0; i < results.size(); i++) {
    auto alias = alias_of(results[i]);
    made->add_root(node, alias, creations[i]);
    attached.push_back(std::move(alias));
  }
  return attached;
}

void attach_replayed(Left&& left, at::TensorList results) {
  const auto call = left.call;
  const auto made = make_node<ReplayedBackward>(std::move(left));
  const NodePointer node = made;
  for (size_t i = 0; i < results.size(); i++) {
    const auto& result = call->results[i];
    if (result.kind != Result::kKept) continue;
    made->note_result(results[i], result.index);
    if (result.requires_grad) made->add_root(node, results[i], result.creation);
  }
}

// Opens the calls that the tensors are results of: the gradients of the tensors are asked for.
void open_calls(at::TensorList tensors) {
  for (const auto& t : tensors) {
    if (!t.defined() || t.is_leaf()) continue;
    // The tensor may have the last reference.
    const NodePointer node = t.grad_fn();
    if (auto* call = dynamic_cast<CallBackward*>(&*node)) call->open();
  }
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("open_calls(Tensor[] tensors) -> ()");
  m.def("take_backwards(int recording) -> int[]", take_passes);
  m.def("add_backward(int recording, int backward) -> ()", add_pass);
  m.def("drop_backwards(int recording) -> ()", drop_passes);
  m.def("differs_in_inputs(int one, int two) -> bool", differ_in_inputs);
  // The results of a replayed call, computed again by Python.
  m.def("recompute(int recording, Tensor?[] arguments) -> Tensor[]");
  m.def("may_recompute(int recording, Tensor?[] arguments) -> bool");
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) { m.impl("open_calls", open_calls); }

}  // namespace tandem
