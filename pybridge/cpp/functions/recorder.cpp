// Recording of calls of functions.
//
// Rust records the operators of a call. The recorder adds the facts that only PyTorch knows: the tensors that the
// storages belong to, gradients, versions, results, and the effects of the call on the host.
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "boundary/errors.h"
#include "calls/function.h"
#include "device/device_type.h"
#include "device/settling.h"
#include "functions/call_backward.h"
#include "functions/recorded.h"

namespace tandem {

namespace {

// The identity of a version counter. PyTorch has no accessor for the pointer that a `VariableVersion` consists of.
const void* counter_of(const c10::VariableVersion& version) {
  static_assert(sizeof(version) == sizeof(void*));
  const void* counter;
  std::memcpy(&counter, static_cast<const void*>(&version), sizeof counter);
  return counter;
}

using Tensors = c10::List<std::optional<at::Tensor>>;
using torch::autograd::Node;

bool is_tandem(const at::Tensor& t) { return t.defined() && t.device().type() == kTandem; }
bool is_host(const at::Tensor& t) { return t.defined() && t.is_cpu() && t.has_storage(); }

template <class Each>
void each_tensor(const c10::IValue& value, Each&& each) {
  if (value.isTensor()) {
    each(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef())
      if (item.isTensor()) each(item.toTensor());
  }
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

// The use that a call makes of host tensors that it has not made, observed at the dispatcher.
//
// A replay reads such a tensor anew if an operator on the device reads it. But values that the host computes from its
// elements would remain those of the recorded call.
class HostEffects {
 public:
  HostEffects();
  ~HostEffects() { at::removeCallback(handle_); }
  HostEffects(const HostEffects&) = delete;
  HostEffects& operator=(const HostEffects&) = delete;

  // Whether the call has made the storage of a host tensor.
  bool has_made(const c10::StorageImpl* storage) const { return made_.count(storage) != 0; }
  // The first effect that a replay would not have; empty if there is none.
  std::string refusal;
  // Whether an operator has returned numbers that may be elements of a host tensor.
  bool reads_values = false;

  // The storages of a call's inputs. The inputs are not accessible when the call ends.
  struct Inputs final : at::ObserverContext {
    std::vector<const c10::StorageImpl*> storages;
    // Whether the operator's kernel may read the elements of a tensor that the call has not made.
    bool may_read = false;
  };
  std::unique_ptr<Inputs> before(const at::RecordFunction& call);
  void after(const at::RecordFunction& call, const Inputs& inputs);

 private:
  void refuse(const at::RecordFunction& call, const char* why) {
    if (refusal.empty()) refusal = std::string(call.name()) + why;
  }

  at::CallbackHandle handle_;
  // Storages that the call has made. Weak references keep their addresses from being reused.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> made_;
};

HostEffects* effects = nullptr;

std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& call) {
  if (!effects || !tt_is_program()) return nullptr;
  return effects->before(call);
}

void observed(const at::RecordFunction& call, at::ObserverContext* inputs) {
  if (effects && inputs) effects->after(call, static_cast<const HostEffects::Inputs&>(*inputs));
}

HostEffects::HostEffects() {
  auto callback = at::RecordFunctionCallback(&observe, &observed);
  callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
  handle_ = at::addThreadLocalCallback(callback);
  effects = this;
}

// Whether an operator has a kernel that handles host tensors itself, instead of only calling other operators.
bool has_host_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

std::unique_ptr<HostEffects::Inputs> HostEffects::before(const at::RecordFunction& call) {
  auto seen = std::make_unique<Inputs>();
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op) return seen;
  const auto& arguments = op->schema().arguments();
  const auto inputs = call.inputs();
  const bool is_kernel = has_host_kernel(*op);
  for (size_t i = 0; i < std::min(inputs.size(), arguments.size()); i++) {
    const auto* alias = arguments[i].alias_info();
    each_tensor(inputs[i], [&](const at::Tensor& t) {
      if (!is_host(t)) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      seen->storages.push_back(storage);
      if (has_made(storage)) return;
      if (alias && alias->isWrite())
        refuse(
            call,
            " writes a host tensor. Keep the tensor on the device (for an optimizer: fused=True or capturable=True)");
      seen->may_read |= is_kernel;
    });
  }
  return seen;
}

void HostEffects::after(const at::RecordFunction& call, const Inputs& inputs) {
  const auto is_input = [&](const c10::StorageImpl* storage) {
    return std::find(inputs.storages.begin(), inputs.storages.end(), storage) != inputs.storages.end();
  };
  bool returns_tensors = false, computes = false;
  for (const auto& output : call.outputs())
    each_tensor(output, [&](const at::Tensor& t) {
      returns_tensors |= t.defined();
      if (!is_host(t)) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (is_input(storage)) return;
      computes = true;
      made_.emplace(storage, t.storage().getWeakStorageImpl());
    });
  reads_values |= !inputs.storages.empty() && !returns_tensors;
  if (inputs.may_read && (computes || !returns_tensors))
    refuse(call,
           " reads a host tensor on the host, where a replay would not read it again. Use it in operators on the "
           "device only, or pass what depends on it as an argument");
}

// The recording of the running call.
class Recorder {
 public:
  // `reached` are the tensors that the function's code can reach by names. `reads_gradients` says whether the code may
  // depend on which tensors have gradients.
  Recorder(at::TensorList arguments, at::TensorList reached, const Recorded* before, bool reads_gradients);
  // Records a backward pass. `saved` are the contexts of the storages that the pass's call has made, null for storages
  // that are gone.
  Recorder(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved);

  void note(const Encoder& encoder);
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
  Surroundings surroundings(const TtRecorded& in_rust) const;
  void find_gradients(const TtRecorded& in_rust);
  void find_owners();
  void find_changes();
  std::optional<Result> place(const at::Tensor& t, const TtRecorded& in_rust) const;
  bool is_consumed(const at::Tensor& t) const;
  size_t argument_on(const void* identity) const;
  // Whether a tensor is a view that the call has made. The call's graph may keep such a view.
  bool is_made_view(const at::Tensor& t) const {
    return t.is_view() && t.grad_fn() && t.grad_fn()->sequence_nr() >= first_node_;
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

std::unique_ptr<Recorder> recorder;
// Whether a thread is recording a call. Operators run without the GIL, so several threads may try to record.
std::atomic<bool> is_taken{false};
std::mutex all_mutex;
std::unordered_map<int64_t, std::shared_ptr<const Recorded>> all;

Recorder::Recorder(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved)
    : arguments_(arguments.vec()), saved_(std::move(saved)) {
  call_.reads_gradients = false;
  for (const auto& t : arguments) {
    call_.arguments.emplace_back(t, arguments);
    argument_versions_.push_back(t.defined() ? version_of(t) : 0);
    argument_nodes_.push_back(t.defined() ? t.grad_fn().get() : nullptr);
    if (t.defined()) arguments_on_[identity(t)].push_back(argument_versions_.size() - 1);
  }
  if (call_.modes.hooks) refuse("hooks for saved tensors are active");
  for (const auto& t : reached) watch(t);
  reached_ = call_.watched.size();
}

Recorder::Recorder(at::TensorList arguments, at::TensorList reached, const Recorded* before, bool reads_gradients)
    : Recorder(arguments, reached, std::vector<void*>()) {
  call_.reads_gradients = reads_gradients;
  for (size_t i = 0; i < arguments.size(); i++)
    if (auto& a = call_.arguments[i]; a.defined) a.same = Argument::first_same(arguments[i], arguments, a.first);
  const auto has_hooks = [](const Argument& argument) { return argument.hooks > 0; };
  const auto is_reached = [&](const at::Tensor& t) {
    return t.defined() &&
           std::any_of(reached.begin(), reached.end(), [&](const auto& other) { return other.is_same(t); });
  };
  // A replay does not compare an argument with the tensors that the function reaches by names.
  if (std::any_of(arguments.begin(), arguments.end(), is_reached))
    refuse("an argument is a tensor that the function also reaches otherwise. Pass a copy (clone())");
  if (std::any_of(call_.arguments.begin(), call_.arguments.end(), has_hooks))
    refuse("an argument has hooks. Register them in the function, on what it computes");
  // Leaves are watched from the beginning, because their gradients are now those before the call. When the call first
  // uses a leaf, it may have dropped the gradient.
  if (!before) return;
  for (const auto& known : before->watched)
    if (auto t = known.tensor.lock()) watch(at::Tensor(std::move(t)));
}

size_t Recorder::watch(const at::Tensor& t) {
  const auto [found, is_new] = seen_.emplace(t.unsafeGetTensorImpl(), call_.watched.size());
  const auto number = found->second;
  if (!is_new) return number;
  call_.watched.emplace_back(t);
  used_.push_back(0);
  // The program may make a new view for each use, but the base tensor is its own.
  if (t.is_view()) watch(at::Tensor(t._base()));
  return number;
}

void Recorder::use(const at::Tensor& t) {
  auto& used = used_[watch(t)];
  if (used != 0) return;
  used = ++uses_;
  if (t.is_view()) use(at::Tensor(t._base()));
}

void Recorder::note(const Encoder& encoder) {
  for (const auto* t : encoder.inputs()) {
    if (t->defined() && !is_within_argument(*t))
      refuse("it uses memory of an argument beyond the argument's elements. Pass the whole tensor");
    if (is_tandem(*t))
      use(*t);
    else if (t->defined())
      call_.fed.emplace_back(*t);
  }
}

void Recorder::read(const at::Tensor& from, const at::Scalar& value) {
  use(from);
  const auto scalar = record_of(value);
  if (!scalar) return;
  TtRead in_rust{};
  tt_record_read(identity(from), *scalar, &in_rust);
  Result place;
  place.kind = in_rust.is_made ? Result::kKept : Result::kGiven;
  place.index = in_rust.storage;
  place.window.emplace(from);
  place.offset = from.storage_offset();
  call_.reads.push_back({std::move(place), *scalar, in_rust.n_given, in_rust.n_hosts});
}

// Notes the leaves that a backward pass reaches, because operators may have used only views of them.
void Recorder::consume(const torch::autograd::Edge& root) {
  each_node(root, [&](Node& node) {
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node); leaf && is_tandem(leaf->variable))
      use(leaf->variable);
    if (std::find(argument_nodes_.begin(), argument_nodes_.end(), &node) != argument_nodes_.end())
      refuse(
          "it runs the backward pass of a graph from outside of the call, which an argument belongs to. Pass the "
          "argument detached");
    return true;
  });
  consumed_.push_back(root);
}

size_t Recorder::argument_on(const void* of) const {
  const auto found = std::find_if(arguments_.begin(), arguments_.end(),
                                  [&](const at::Tensor& t) { return t.defined() && identity(t) == of; });
  return found - arguments_.begin();
}

bool Recorder::is_within_argument(const at::Tensor& t) const {
  const auto first = arguments_on_.find(identity(t));
  if (first == arguments_on_.end()) return true;
  const auto ends = [](const at::Tensor& t) {
    int64_t last = t.storage_offset();
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    return std::pair(t.storage_offset() * t.itemsize(), (last + 1) * static_cast<int64_t>(t.itemsize()));
  };
  const auto [begin, end] = ends(t);
  return t.numel() == 0 || std::any_of(first->second.begin(), first->second.end(), [&](size_t i) {
           const auto [from, to] = ends(arguments_[i]);
           return from <= begin && end <= to;
         });
}

bool Recorder::uses_gradients(const TtRecorded& in_rust) const {
  const auto& watched = call_.watched;
  return std::any_of(in_rust.given, in_rust.given + in_rust.n_given, [&](void* context) {
    const auto is_on = [&](const Watched& w) { return w.context == context; };
    const auto reached = watched.begin() + static_cast<std::ptrdiff_t>(std::min(reached_, watched.size()));
    if (argument_on(context) < arguments_.size() || std::any_of(watched.begin(), reached, is_on)) return false;
    const auto holds = [&](const auto& leaf) { return leaf.gradient.defined && leaf.gradient.context == context; };
    return std::any_of(watched.begin(), watched.end(), holds) ||
           std::any_of(call_.arguments.begin(), call_.arguments.end(), holds);
  });
}

void Recorder::find_given(const TtRecorded& in_rust) {
  std::vector<int64_t> bases;
  for (size_t i = 0; i < in_rust.n_given; i++) {
    void* context = in_rust.given[i];
    Given given{Given::kCaptured, 0, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()), context, 0};
    const auto argument = argument_on(context);
    const auto& watched = call_.watched;
    const auto matters = [&](const Watched& w) { return is_kept(&w - watched.data()); };
    const auto is_reached = [&](const Watched& w) { return static_cast<size_t>(&w - watched.data()) < reached_; };
    const auto on = [&](const Watched& w) { return w.context == context && matters(w); };
    const auto holds = [&](const Watched& w) {
      return call_.reads_gradients && w.gradient.defined && w.gradient.context == context && matters(w);
    };
    const auto owner = std::find_if(watched.begin(), watched.end(), on);
    const auto leaf = std::find_if(watched.begin(), watched.end(), holds);
    const auto is_others = [&](const Watched& w) { return w.context == context && is_reached(w); };
    const auto saved = std::find(saved_.begin(), saved_.end(), context);
    if (saved != saved_.end()) {
      given.kind = Given::kSaved, given.index = saved - saved_.begin();
      // A storage that is gone may have passed its number on to another storage.
      if (argument < arguments_.size() || std::any_of(watched.begin(), watched.end(), is_others))
        refuse("a gradient shares its memory with a tensor that the call has made");
    } else if (argument < arguments_.size()) {
      given.kind = Given::kArgument, given.index = argument;
      given.base = arguments_[argument].storage_offset();
      if (leaf != watched.end() || std::any_of(watched.begin(), watched.end(), is_others))
        refuse(
            "an argument shares its memory with a tensor that the function uses otherwise, or with a gradient. Pass "
            "a copy (clone()), or both as arguments");
    } else if (leaf != watched.end()) {
      if (std::find_if(std::next(leaf), watched.end(), holds) != watched.end() ||
          std::any_of(watched.begin(), watched.end(), is_others))
        refuse("a gradient shares its memory with another gradient or tensor that the function uses");
      given.kind = Given::kGradient, given.index = leaf - watched.begin();
    } else if (owner != watched.end()) {
      given.storage = owner->storage;
    }
    bases.push_back(given.base);
    call_.given.push_back(std::move(given));
  }
  tt_record_rebase(in_rust.id, bases.data(), bases.size());
  for (auto& read : call_.reads)
    if (read.from.kind == Result::kGiven) read.from.offset -= bases[read.from.index];
}

// Keeps a watched tensor that still lives and is not an argument, if names reach it, or if the call uses it and was
// given its storage. The order of the kept tensors depends on this call alone: first the tensors that names reach, then
// the others in order of use.
void Recorder::keep_watched() {
  std::vector<size_t> numbers(call_.watched.size(), SIZE_MAX);
  std::vector<size_t> order;
  for (size_t i = 0; i < call_.watched.size(); i++)
    if (is_kept(i)) order.push_back(i);
  std::sort(order.begin() + static_cast<std::ptrdiff_t>(std::min(reached_, order.size())), order.end(),
            [&](size_t a, size_t b) { return used_[a] < used_[b]; });
  std::vector<Watched> kept;
  for (const size_t i : order) {
    auto& w = call_.watched[i];
    const auto t = w.tensor.lock();
    if (!t) continue;
    const auto is_t = [&](const at::Tensor& a) { return a.unsafeGetTensorImpl() == t.get(); };
    if (std::any_of(arguments_.begin(), arguments_.end(), is_t)) continue;
    const auto captures = [&](const Given& g) { return g.kind == Given::kCaptured && g.context == w.context; };
    const auto is_leaf_of = [&](const Given& g) { return g.kind == Given::kGradient && g.index == i; };
    const auto uses = [&](const Given& g) { return captures(g) || is_leaf_of(g); };
    if (i >= reached_ && std::none_of(call_.given.begin(), call_.given.end(), uses)) continue;
    if (i >= reached_ && is_made_view(at::Tensor(t))) continue;
    numbers[i] = kept.size();
    call_.watched_writes.push_back(w.version.enabled() ? w.version.current_version() - w.first_version : 0);
    kept.push_back(w);
  }
  for (auto& given : call_.given) {
    if (given.kind != Given::kGradient) continue;
    given.index = numbers[given.index];
    if (given.index == SIZE_MAX) refuse("it uses the gradient of an argument, or of a tensor that no longer exists");
  }
  call_.watched = std::move(kept);
  seen_.clear();
  for (size_t i = 0; i < call_.watched.size(); i++) seen_.emplace(call_.watched[i].tensor.lock().get(), i);
  for (size_t i = 0; i < arguments_.size(); i++)
    call_.argument_writes.push_back(arguments_[i].defined() ? version_of(arguments_[i]) - argument_versions_[i] : 0);
  // Tensors that share a version counter must count its writes only once.
  ska::flat_hash_set<const void*> counted;
  const auto once = [&](const c10::VariableVersion& version, uint32_t& writes) {
    if (writes > 0 && !counted.insert(counter_of(version)).second) writes = 0;
  };
  for (size_t i = 0; i < arguments_.size(); i++)
    if (arguments_[i].defined()) once(arguments_[i].unsafeGetTensorImpl()->version_counter(), call_.argument_writes[i]);
  for (size_t i = 0; i < call_.watched.size(); i++) once(call_.watched[i].version, call_.watched_writes[i]);
}

void Recorder::find_fed(int64_t id, size_t hosts) {
  if (call_.fed.size() != hosts) return refuse("host tensors are used by operators that are not recorded");
  for (auto& fed : call_.fed) {
    const auto storage = fed.storage.lock();
    const auto argument = storage ? argument_on(storage.get()) : arguments_.size();
    fed.is_kept = storage;
    if (fed.is_number) continue;
    if (!storage) {
      if (!fed.is_own)
        refuse("memory that is not PyTorch's (NumPy's, for example) is copied to the device; pass a tensor");
    } else if (argument < arguments_.size()) {
      fed.kind = Fed::kArgument, fed.index = argument;
      fed.offset -= arguments_[argument].storage_offset();
    } else if (!host_.has_made(storage.get())) {
      fed.kind = Fed::kCaptured;
      const auto is_owner = [&](const Watched& w) { return w.context == storage.get(); };
      if (std::none_of(call_.watched.begin(), call_.watched.end(), is_owner))
        refuse("it feeds a host tensor that is not found in its state. Pass it as an argument");
    }
    if (fed.kind != Fed::kConstant) tt_record_feeds_again(id, &fed - call_.fed.data());
  }
  const auto is_made = [](const Fed& fed) { return fed.kind == Fed::kConstant && !fed.is_number; };
  call_.uses_made_values = host_.reads_values || std::any_of(call_.fed.begin(), call_.fed.end(), is_made);
}

// Whether the call has run a backward pass that freed the graph of a result.
bool Recorder::is_consumed(const at::Tensor& t) const {
  bool found = false;
  for (const auto& root : consumed_)
    each_node(root, [&](Node& node) {
      found |= &node == t.grad_fn().get();
      return !found;
    });
  return found;
}

// Finds the origin of a tensor, from which a replay gets it. Returns nothing for a tensor that the call neither made
// nor was given.
std::optional<Result> Recorder::place(const at::Tensor& t, const TtRecorded& in_rust) const {
  Result result;
  if (!t.defined()) return result;
  if (!t.has_storage()) return std::nullopt;
  result.version = version_of(t), result.counter = counter_of(t.unsafeGetTensorImpl()->version_counter());
  for (size_t i = 0; i < arguments_.size(); i++) {
    if (!arguments_[i].is_same(t)) continue;
    result.kind = Result::kArgument, result.index = i;
    return result;
  }
  if (const auto seen = seen_.find(t.unsafeGetTensorImpl()); seen != seen_.end()) {
    result.kind = Result::kWatched, result.index = seen->second;
    return result;
  }
  if (!is_tandem(t)) return std::nullopt;
  result.window.emplace(t);
  result.offset = t.storage_offset();
  const auto* context = identity(t);
  for (size_t i = 0; i < in_rust.n_kept; i++) {
    if (!in_rust.kept[i].is_kept || in_rust.kept[i].storage != context) continue;
    result.kind = Result::kKept, result.index = i;
    return result;
  }
  for (size_t i = 0; i < call_.given.size(); i++) {
    if (call_.given[i].context != context) continue;
    result.kind = Result::kGiven, result.index = i, result.offset -= call_.given[i].base;
    return result;
  }
  return std::nullopt;
}

void Recorder::find_results(at::TensorList results, const std::vector<bool>& consumed, bool attaches,
                            const TtRecorded& in_rust) {
  for (size_t i = 0; i < results.size(); i++) {
    const auto& t = results[i];
    if (t.defined() && !t.has_storage()) {
      refuse("it returns a sparse tensor. Return a dense one");
      call_.results.emplace_back();
      continue;
    }
    auto result = place(t, in_rust);
    if (!result && is_tandem(t) && is_made_view(t))
      refuse("a result that requires grad is a view of a tensor from outside of the call. Return a copy (clone())");
    if (!result && is_tandem(t)) {
      // The call returns a tensor of the program that no operator has used.
      watch(t);
      call_.watched_writes.push_back(0);
      result = place(t, in_rust);
    }
    if (!result) {
      refuse("it returns a tensor on the host");
      result.emplace();
    }
    // A view of a leaf that was made without grad mode reports the leaf's requires_grad, but has no graph.
    const bool has_graph = t.defined() && t.requires_grad() && !(t.is_leaf() && t.is_view());
    if (has_graph && result->kind != Result::kArgument && result->kind != Result::kWatched) {
      result->requires_grad = true;
      result->is_consumed = consumed[i];
      if (!consumed[i] && result->kind != Result::kKept)
        refuse("a result that requires grad is a view of a tensor from outside of the call. Return a copy (clone())");
      else if (!consumed[i] && !attaches)
        refuse(
            "a result requires grad, and it has attributes or is of a subclass, or the call returns objects, changes "
            "its arguments, has effects that are skipped, or uses hooks for saved tensors");
    }
    call_.results.push_back(std::move(*result));
  }
}

void Recorder::find_bases(at::TensorList results, const TtRecorded& in_rust) {
  std::vector<at::Tensor> bases;
  const auto number_of = [&](const at::Tensor& base) {
    return static_cast<size_t>(
        std::find_if(bases.begin(), bases.end(), [&](const auto& t) { return t.is_same(base); }) - bases.begin());
  };
  // A view that existed before the call stands for a base that the call has not seen.
  const auto seen = [&](const at::Tensor& base) {
    const auto has_base = [&](const at::Tensor& t) {
      return t.defined() && (t.is_same(base) || (t.is_view() && t._base().is_same(base)));
    };
    const auto argument = std::find_if(arguments_.begin(), arguments_.end(), has_base);
    if (argument != arguments_.end()) return *argument;
    for (const auto& watched : call_.watched)
      if (at::Tensor t(watched.tensor.lock()); has_base(t)) return t;
    return base;
  };
  const auto is_placed = [](const Result& result) {
    return result.kind == Result::kKept || result.kind == Result::kGiven;
  };
  for (size_t i = 0; i < results.size(); i++) {
    auto& result = call_.results[i];
    if (!is_placed(result) || result.requires_grad || !results[i].is_view()) continue;
    const at::Tensor base(results[i]._base());
    const auto number = number_of(base);
    if (number == bases.size()) {
      const auto stands = seen(base);
      const auto from = place(stands, in_rust);
      const auto is_base = [&](const at::Tensor& t) { return t.is_same(base); };
      const bool is_made = stands.is_same(base) && from && is_placed(*from);
      if (!from || (is_made && base.requires_grad() && std::none_of(results.begin(), results.end(), is_base)))
        return refuse("it returns a view of a tensor from within the call. Return a copy (clone())");
      call_.bases.push_back(*from), bases.push_back(base);
    }
    result.view = View{number, false, torch::autograd::impl::get_view_autograd_meta(results[i])->get_creation_meta()};
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto number = results[i].defined() ? number_of(results[i]) : bases.size();
    if (number < bases.size() && is_placed(call_.results[i]))
      call_.results[i].view = View{number, true, torch::autograd::CreationMeta::DEFAULT};
  }
}

std::optional<Cut> Recorder::find_graph(at::TensorList results, bool has_backward) {
  std::vector<at::Tensor> attached;
  std::vector<size_t> storages;
  for (size_t i = 0; i < results.size(); i++) {
    const auto& result = call_.results[i];
    if (result.kind == Result::kKept) storages.push_back(result.index);
    if (result.requires_grad && !result.is_consumed) attached.push_back(results[i]);
  }
  if (attached.empty() || !call_.refusal.empty()) return std::nullopt;
  if (has_backward) {
    refuse("it runs a backward pass, and returns another result that requires grad");
    return std::nullopt;
  }
  std::sort(storages.begin(), storages.end());
  if (std::adjacent_find(storages.begin(), storages.end()) != storages.end()) {
    refuse("it returns several tensors on the same memory, of which one requires grad. Return copies (clone())");
    return std::nullopt;
  }
  auto graph = cut_out(attached, arguments_, first_node_);
  if (!graph.refusal.empty()) {
    refuse(graph.refusal);
    return std::nullopt;
  }
  for (const auto& edge : graph.targets) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    const auto is_target = [&](const at::Tensor& t) {
      if (!t.defined() || !t.requires_grad()) return false;
      return leaf ? t.is_same(leaf->variable) : t.grad_fn() == edge.function && t.output_nr() == edge.input_nr;
    };
    const auto argument = std::find_if(arguments_.begin(), arguments_.end(), is_target);
    const auto seen = leaf ? seen_.find(leaf->variable.unsafeGetTensorImpl()) : seen_.end();
    if (argument != arguments_.end() && !is_tandem(*argument)) refuse("an argument on the host requires grad");
    if (!accepts_shape_of(leaf ? leaf->variable : *argument, edge))
      refuse("a leaf has another shape than when a graph of autograd began to use it, and that graph still exists");
    if (argument != arguments_.end())
      call_.targets.push_back({true, static_cast<size_t>(argument - arguments_.begin())});
    else if (seen != seen_.end())
      call_.targets.push_back({false, seen->second});
    else
      refuse("a result that requires grad depends on a leaf that the call has made");
  }
  if (!call_.refusal.empty()) return std::nullopt;
  call_.joint_roots = joint_roots(graph);
  return graph;
}

void Recorder::attach(int64_t id, Cut&& graph, Surroundings&& around, std::vector<at::Tensor>& results) const {
  std::vector<at::Tensor> attached;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < results.size(); i++) {
    if (!call_.results[i].requires_grad || call_.results[i].kind != Result::kKept) continue;
    numbers.push_back(i);
    attached.push_back(results[i]);
  }
  attached = attach_recorded(id, std::move(graph), std::move(around), attached);
  for (size_t i = 0; i < numbers.size(); i++) results[numbers[i]] = std::move(attached[i]);
}

void Recorder::refuse_kept(const TtRecorded& in_rust) {
  std::vector<bool> owned;
  for (size_t i = 0; i < in_rust.n_kept; i++) owned.push_back(!in_rust.kept[i].is_kept);
  for (const auto& result : call_.results)
    if (result.kind == Result::kKept) owned[result.index] = true;
  for (const auto& left : call_.gradients)
    if (left.gradient.kind == Result::kKept) owned[left.gradient.index] = true;
  for (size_t i = 0; i < owned.size(); i++)
    if (!owned[i]) tt_record_keeps(in_rust.id, in_rust.kept[i].storage);
}

Surroundings Recorder::surroundings(const TtRecorded& in_rust) const {
  Surroundings around;
  around.arguments = arguments_;
  for (size_t i = 0; i < in_rust.n_kept; i++)
    around.saved.push_back(in_rust.kept[i].is_kept ? in_rust.kept[i].storage : nullptr);
  for (const auto& w : call_.watched) around.reached.push_back(w.tensor);
  return around;
}

void Recorder::find_gradients(const TtRecorded& in_rust) {
  // Version counters whose writes are counted already: gradients may be views of other tensors.
  ska::flat_hash_set<const void*> counted;
  for (size_t i = 0; i < arguments_.size(); i++)
    if (call_.argument_writes[i] > 0)
      counted.insert(counter_of(arguments_[i].unsafeGetTensorImpl()->version_counter()));
  for (size_t i = 0; i < call_.watched.size(); i++)
    if (call_.watched_writes[i] > 0) counted.insert(counter_of(call_.watched[i].version));
  const auto look = [&](bool is_argument, size_t leaf, const at::Tensor& t, const Gradient& before) {
    const auto& grad = t.grad();
    if (!grad.defined() && !before.defined) return;
    auto gradient = place(grad, in_rust);
    const bool is_new = gradient && gradient->kind == Result::kKept;
    if (!is_new && grad.defined() && before.defined && identity(grad) == before.context) {
      const auto writes = version_of(grad) - before.version;
      if (writes > 0 && counted.insert(counter_of(grad.unsafeGetTensorImpl()->version_counter())).second)
        call_.written_gradients.push_back({is_argument, leaf, writes});
      return;
    }
    if (!gradient) return refuse("a gradient is a tensor that the call neither made nor was given");
    call_.gradients.push_back({is_argument, leaf, std::move(*gradient)});
  };
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto& t = arguments_[i];
    if (!is_tandem(t) || !t.is_leaf()) continue;
    look(true, i, t, call_.arguments[i].gradient);
  }
  for (size_t i = 0; i < call_.watched.size(); i++) {
    const auto& w = call_.watched[i];
    if (!w.is_leaf) continue;
    if (auto t = w.tensor.lock()) look(false, i, at::Tensor(std::move(t)), w.gradient);
  }
}

// Notes the storages that belong to watched tensors. Refuses results that count writes to their storage separately: in a
// replay, all results on a storage share the version counter of the tensor that the storage belongs to.
void Recorder::find_owners() {
  for (const auto& w : call_.watched) call_.owned.push_back(w.context);
  std::sort(call_.owned.begin(), call_.owned.end());
  std::unordered_map<size_t, const void*> counters;
  const auto expected = [&](const Result& result) {
    if (result.kind == Result::kKept) return counters.emplace(result.index, result.counter).first->second;
    const auto& given = call_.given[result.index];
    if (given.kind == Given::kArgument)
      return counter_of(arguments_[given.index].unsafeGetTensorImpl()->version_counter());
    const auto owns = [&](const Watched& w) { return given.kind == Given::kCaptured && w.context == given.context; };
    const auto owner = std::find_if(call_.watched.begin(), call_.watched.end(), owns);
    return owner == call_.watched.end() ? result.counter : counter_of(owner->version);
  };
  const auto look = [&](const Result& result) {
    if (result.kind != Result::kKept && result.kind != Result::kGiven) return;
    if (expected(result) != result.counter)
      refuse("it returns tensors that share memory and count its writes apart (.data)");
  };
  for (const auto& result : call_.results) look(result);
  for (const auto& left : call_.gradients) look(left.gradient);
}

// Refuses calls that change tensors' metadata or PyTorch's settings, which a replay does not change.
void Recorder::find_changes() {
  if (!(call_.modes == Modes::now())) refuse("it changes a setting of PyTorch and leaves it changed");
  static const char* const why =
      "it changes a tensor in a way that is no operator (requires_grad_, .data, set_, a hook, or the shape in place). "
      "Do "
      "that outside of the function";
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto& t = arguments_[i];
    if (!call_.arguments[i].is_unchanged(t)) refuse(why);
    if (t.defined() && t.grad_fn().get() != argument_nodes_[i])
      refuse("it changes an argument in place that requires grad. Change a copy (clone())");
  }
  for (const auto& w : call_.watched)
    if (auto t = w.tensor.lock(); t && !w.is_same(at::Tensor(std::move(t)))) refuse(why);
}

int64_t Recorder::finish(std::vector<at::Tensor>& results, bool attaches) {
  std::vector<bool> consumed;
  for (const auto& t : results) consumed.push_back(t.defined() && t.requires_grad() && is_consumed(t));
  const bool has_backward = !consumed_.empty();
  // Tensors that only the graphs keep alive must not count as kept.
  consumed_.clear();
  TtRecorded in_rust{};
  tt_record_end(&in_rust);
  call_.reads_gradients |= has_backward || uses_gradients(in_rust);
  call_.undone.assign(in_rust.undone, in_rust.undone + in_rust.n_undone);
  call_.undoes_draws = in_rust.undoes_draws != 0;
  find_given(in_rust);
  keep_watched();
  find_fed(in_rust.id, in_rust.n_hosts);
  find_results(results, consumed, attaches, in_rust);
  find_bases(results, in_rust);
  find_gradients(in_rust);
  find_owners();
  find_changes();
  if (!host_.refusal.empty()) refuse(host_.refusal);
  call_.reads_gradients |= !call_.gradients.empty() || !call_.written_gradients.empty();
  auto graph = find_graph(results, has_backward);
  if (!graph && call_.refusal.empty()) refuse_kept(in_rust);
  if (graph) attach(in_rust.id, std::move(*graph), surroundings(in_rust), results);
  const std::lock_guard<std::mutex> lock(all_mutex);
  all.emplace(in_rust.id, std::make_shared<const Recorded>(std::move(call_)));
  return in_rust.id;
}

// Ends the recording even if an operator of the recorder itself fails.
struct Ended {
  bool is_over = true;
  ~Ended() {
    if (!is_over) return;
    is_recording = false;
    effects = nullptr;
    recorder.reset();
    is_taken = false;
  }
};

// Returns false if a call is being recorded already, or if another thread has become the program's.
template <class... Arguments>
bool begin(Arguments&&... arguments) {
  settle_all();
  if (is_recording || is_taken.exchange(true)) return false;
  Ended guard;
  recorder = std::make_unique<Recorder>(std::forward<Arguments>(arguments)...);
  if (!tt_record_begin()) return false;
  is_recording = true;
  guard.is_over = false;
  return true;
}

int64_t end(std::vector<at::Tensor>& results, bool attaches) {
  const Ended guard;
  is_recording = false;
  TORCH_CHECK(recorder, "no call is recorded");
  return recorder->finish(results, attaches);
}

std::string refusal(int64_t id) {
  const auto call = find_recorded(id);
  return call ? call->refusal : "";
}

void drop(int64_t id) {
  const std::lock_guard<std::mutex> lock(all_mutex);
  all.erase(id);
}

std::string unequal(int64_t one, int64_t two) {
  const auto a = find_recorded(one), b = find_recorded(two);
  return a && b ? difference(*a, *b) : "";
}

}  // namespace

bool begin_recording_backward(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved) {
  return tt_is_program() && begin(arguments, reached, std::move(saved));
}

int64_t end_recording(at::TensorList results) {
  auto all_results = results.vec();
  return end(all_results, false);
}

void cancel_recording() {
  const Ended guard;
  tt_record_cancel();
}

void drop_recording(int64_t id) {
  drop(id);
  tt_record_drop(id);
}

std::shared_ptr<const Recorded> find_recorded(int64_t id) {
  const std::lock_guard<std::mutex> lock(all_mutex);
  const auto found = all.find(id);
  return found == all.end() ? nullptr : found->second;
}

void note_inputs(uint32_t op, const Encoder& encoder) {
  if (!tt_is_program()) return;
  if (observer)
    observer->note(op, encoder);
  else if (recorder)
    recorder->note(encoder);
}

void note_read(const at::Tensor& from, const at::Scalar& value) {
  if (recorder && tt_is_program()) recorder->read(from, value);
}

void note_refusal(const char* why) {
  if (recorder && tt_is_program()) recorder->refuse(why);
}

void note_consumed(const torch::autograd::Edge& root) {
  if (recorder && tt_is_program()) recorder->consume(root);
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("record(Tensor?[] arguments, Tensor[] reached, int before, bool reads_gradients) -> bool");
  // Returns the number of the recording, and the tensors to use in place of the results.
  m.def("end_recording(Tensor?[] results, bool attaches) -> (int, Tensor?[])");
  m.def("may_record() -> bool", [] { return !is_recording && tt_is_program(); });
  m.def("cancel_recording() -> ()", cancel_recording);
  m.def("refusal(int recording) -> str", refusal);
  m.def("unequal(int one, int two) -> str", unequal);
  m.def("drop_recording(int recording) -> ()", drop);
  m.def("uses_made_values(int recording) -> bool", [](int64_t id) {
    const auto call = find_recorded(id);
    return !call || call->uses_made_values;
  });
  m.def("has_backward(int recording) -> bool", [](int64_t id) {
    const auto call = find_recorded(id);
    return call && !call->targets.empty();
  });
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) {
  m.impl("record", [](const Tensors& arguments, at::TensorList reached, int64_t before, bool reads_gradients) {
    return begin(undefined_for_none(arguments), reached, find_recorded(before).get(), reads_gradients);
  });
  m.impl("end_recording", [](const Tensors& list, bool attaches) {
    auto results = undefined_for_none(list);
    const auto id = end(results, attaches);
    Tensors attached;
    for (auto& t : results) attached.push_back(t.defined() ? std::optional(std::move(t)) : std::nullopt);
    return std::tuple(id, attached);
  });
}

}  // namespace tandem
