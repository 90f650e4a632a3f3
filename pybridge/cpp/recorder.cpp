// Recording of calls of functions.
//
// Rust records the operators of a call. The recorder adds what only PyTorch knows: which tensors the storages belong to,
// gradients, versions, results, and what the call does on the host.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device_type.h"
#include "errors.h"
#include "function.h"
#include "recorded.h"
#include "settling.h"

namespace tandem {

namespace {

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

// What a call does with host tensors, observed at the dispatcher.
class HostEffects {
 public:
  HostEffects();
  ~HostEffects() { at::removeCallback(handle_); }
  HostEffects(const HostEffects&) = delete;
  HostEffects& operator=(const HostEffects&) = delete;

  // Whether the call has made the storage of a host tensor.
  bool has_made(const c10::StorageImpl* storage) const { return made_.count(storage) != 0; }
  std::vector<HostRead> take_reads();
  // An effect that a replay would not have; empty if there is none.
  std::string hindrance;

  // The storages of a call's inputs, which are not accessible when it ends.
  struct Inputs final : at::ObserverContext {
    std::vector<const c10::StorageImpl*> storages;
  };
  std::unique_ptr<Inputs> before(const at::RecordFunction& call);
  void after(const at::RecordFunction& call, const Inputs& inputs);

 private:
  at::CallbackHandle handle_;
  // Storages that the call has made. The references keep their addresses from being reused.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> made_;
  std::vector<HostRead> reads_;
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

std::unique_ptr<HostEffects::Inputs> HostEffects::before(const at::RecordFunction& call) {
  auto seen = std::make_unique<Inputs>();
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op) return seen;
  const auto& arguments = op->schema().arguments();
  const auto inputs = call.inputs();
  for (size_t i = 0; i < std::min(inputs.size(), arguments.size()); i++) {
    const auto* alias = arguments[i].alias_info();
    each_tensor(inputs[i], [&](const at::Tensor& t) {
      if (!is_host(t)) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      seen->storages.push_back(storage);
      if (has_made(storage)) return;
      if (alias && alias->isWrite()) {
        hindrance = std::string(call.name()) +
                    " writes a host tensor. Keep the tensor on the device (for an optimizer: fused=True or capturable=True)";
        return;
      }
      const auto& version = t.unsafeGetTensorImpl()->version_counter();
      if (version.enabled()) reads_.push_back({version, version.current_version()});
    });
  }
  return seen;
}

void HostEffects::after(const at::RecordFunction& call, const Inputs& inputs) {
  for (const auto& output : call.outputs())
    each_tensor(output, [&](const at::Tensor& t) {
      if (!is_host(t)) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (std::find(inputs.storages.begin(), inputs.storages.end(), storage) != inputs.storages.end()) return;
      made_.emplace(storage, t.storage().getWeakStorageImpl());
    });
}

std::vector<HostRead> HostEffects::take_reads() {
  std::vector<HostRead> reads;
  for (auto& read : reads_)
    if (read.version.current_version() == read.at) reads.push_back(std::move(read));
  return reads;
}

// The recording of the running call.
class Recorder {
 public:
  // `reached` are the tensors that the function's code can reach by names.
  Recorder(at::TensorList arguments, at::TensorList reached, const Recorded* before);

  void note(const Encoder& encoder);
  void read(const at::Tensor& from, const at::Scalar& value);
  void consume(const torch::autograd::Edge& root);
  // Ends the recording. Returns its number.
  int64_t finish(at::TensorList results);
  void hinder(std::string why) {
    if (call_.hindrance.empty()) call_.hindrance = std::move(why);
  }

 private:
  // Watches a tensor from now on. Returns its number.
  size_t watch(const at::Tensor& t);
  // Watches a tensor that the call uses now.
  void use(const at::Tensor& t);
  // Whether a watched tensor is reached by names or used, and not only by the call before.
  bool is_kept(size_t number) const { return number < reached_ || used_[number] != 0; }
  void find_given(const TtRecorded& in_rust);
  void keep_watched();
  void find_fed(int64_t id, size_t hosts);
  void find_results(at::TensorList results, const std::vector<bool>& consumed, const TtRecorded& in_rust);
  void find_gradients(const TtRecorded& in_rust);
  std::optional<Result> place(const at::Tensor& t, const TtRecorded& in_rust) const;
  bool is_consumed(const at::Tensor& t) const;
  size_t argument_on(const void* identity) const;

  Recorded call_;
  std::vector<at::Tensor> arguments_;
  std::vector<uint32_t> argument_versions_;
  // Number of watched tensors that the function can reach by names. They come first.
  size_t reached_ = 0;
  // For each watched tensor, its number in the order of first use by the call; 0 for tensors that it has not used.
  std::vector<size_t> used_;
  size_t uses_ = 0;
  ska::flat_hash_map<const c10::TensorImpl*, size_t> seen_;
  std::vector<torch::autograd::Edge> consumed_;
  HostEffects host_;
};

std::unique_ptr<Recorder> recorder;
std::unordered_map<int64_t, std::shared_ptr<const Recorded>> all;

uint32_t version_of(const at::Tensor& t) {
  const auto& version = t.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

Recorder::Recorder(at::TensorList arguments, at::TensorList reached, const Recorded* before)
    : arguments_(arguments.vec()) {
  for (const auto& t : arguments) {
    call_.arguments.emplace_back(t, arguments);
    argument_versions_.push_back(t.defined() ? version_of(t) : 0);
  }
  for (const auto& t : reached) watch(t);
  reached_ = call_.watched.size();
  // The gradients that leaves have now are those before the call; the call may have dropped them when it first uses a
  // leaf.
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
  // A view may be made for each use; the tensor that it views is the program's.
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

// Notes the leaves that a backward pass reaches: operators may have used views of them only.
void Recorder::consume(const torch::autograd::Edge& root) {
  each_node(root, [&](Node& node) {
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node); leaf && is_tandem(leaf->variable))
      use(leaf->variable);
    return true;
  });
  consumed_.push_back(root);
}

size_t Recorder::argument_on(const void* of) const {
  const auto found = std::find_if(arguments_.begin(), arguments_.end(),
                                  [&](const at::Tensor& t) { return t.defined() && identity(t) == of; });
  return found - arguments_.begin();
}

void Recorder::find_given(const TtRecorded& in_rust) {
  std::vector<int64_t> bases;
  for (size_t i = 0; i < in_rust.n_given; i++) {
    void* context = in_rust.given[i];
    Given given{Given::kCaptured, 0, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()), context, 0};
    const auto argument = argument_on(context);
    const auto& watched = call_.watched;
    const auto matters = [&](const Watched& w) { return is_kept(&w - watched.data()); };
    const auto on = [&](const Watched& w) { return w.context == context && matters(w); };
    const auto holds = [&](const Watched& w) {
      return w.gradient.defined && w.gradient.context == context && matters(w);
    };
    const auto owner = std::find_if(watched.begin(), watched.end(), on);
    const auto leaf = std::find_if(watched.begin(), watched.end(), holds);
    if (argument < arguments_.size()) {
      given.kind = Given::kArgument, given.index = argument;
      given.base = arguments_[argument].storage_offset();
    } else if (leaf != watched.end()) {
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

// Keeps the watched tensors that live, are not arguments, and are reached by names or used and on storages that the call
// was given. Their order depends on this call alone: first those reached by names, then the others in order of use.
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
    numbers[i] = kept.size();
    call_.watched_writes.push_back(w.version.enabled() ? w.version.current_version() - w.first_version : 0);
    kept.push_back(w);
  }
  for (auto& given : call_.given) {
    if (given.kind != Given::kGradient) continue;
    given.index = numbers[given.index];
    if (given.index == SIZE_MAX) hinder("it uses the gradient of an argument, or of a tensor that no longer exists");
  }
  call_.watched = std::move(kept);
  seen_.clear();
  for (size_t i = 0; i < call_.watched.size(); i++) seen_.emplace(call_.watched[i].tensor.lock().get(), i);
  for (size_t i = 0; i < arguments_.size(); i++)
    call_.argument_writes.push_back(arguments_[i].defined() ? version_of(arguments_[i]) - argument_versions_[i] : 0);
  // Tensors that share a version counter count its writes once.
  ska::flat_hash_map<void*, std::vector<uint32_t>> counted;
  const auto once = [&](void* storage, uint32_t now, uint32_t& writes) {
    auto& known = counted[storage];
    if (writes > 0 && std::find(known.begin(), known.end(), now) != known.end()) writes = 0;
    if (writes > 0) known.push_back(now);
  };
  for (size_t i = 0; i < arguments_.size(); i++)
    if (arguments_[i].defined()) once(identity(arguments_[i]), version_of(arguments_[i]), call_.argument_writes[i]);
  for (size_t i = 0; i < call_.watched.size(); i++) {
    const auto& version = call_.watched[i].version;
    if (version.enabled()) once(call_.watched[i].context, version.current_version(), call_.watched_writes[i]);
  }
}

void Recorder::find_fed(int64_t id, size_t hosts) {
  if (call_.fed.size() != hosts) return hinder("host tensors are used by operators that are not recorded");
  for (auto& fed : call_.fed) {
    const auto storage = fed.storage.lock();
    const auto argument = storage ? argument_on(storage.get()) : arguments_.size();
    if (!storage) {
      if (!fed.is_own) hinder("memory that is not PyTorch's (NumPy's, for example) is copied to the device; pass a tensor");
    } else if (argument < arguments_.size()) {
      fed.kind = Fed::kArgument, fed.index = argument;
      fed.offset -= arguments_[argument].storage_offset();
    } else if (!host_.has_made(storage.get())) {
      fed.kind = Fed::kCaptured;
    }
    if (fed.kind != Fed::kConstant) tt_record_feeds_again(id, &fed - call_.fed.data());
  }
}

// Whether a backward pass of the call has run and freed the graph that a result belongs to.
bool Recorder::is_consumed(const at::Tensor& t) const {
  bool found = false;
  for (const auto& root : consumed_)
    each_node(root, [&](Node& node) {
      found |= &node == t.grad_fn().get();
      return !found;
    });
  return found;
}

// Finds where a replay gets a tensor from. Returns nothing for a tensor that the call neither made nor was given.
std::optional<Result> Recorder::place(const at::Tensor& t, const TtRecorded& in_rust) const {
  Result result;
  if (!t.defined()) return result;
  result.version = version_of(t);
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

void Recorder::find_results(at::TensorList results, const std::vector<bool>& consumed, const TtRecorded& in_rust) {
  for (size_t i = 0; i < results.size(); i++) {
    const auto& t = results[i];
    auto result = place(t, in_rust);
    if (!result && is_tandem(t)) {
      // The call returns a tensor of the program that no operator used.
      watch(t);
      call_.watched_writes.push_back(0);
      result = place(t, in_rust);
    }
    if (!result) {
      hinder("it returns a tensor on the host");
      result.emplace();
    }
    // A view of a leaf that was made without grad reports the leaf's requires_grad, and has no graph.
    const bool has_graph = t.defined() && t.requires_grad() && !(t.is_leaf() && t.is_view());
    if (has_graph && result->kind != Result::kArgument && result->kind != Result::kWatched) {
      result->requires_grad = true;
      if (!consumed[i])
        hinder("a result requires grad: its backward pass would be outside of the function. Call it under "
               "torch.no_grad(), or make the whole step, with the backward pass, the function");
    }
    call_.results.push_back(std::move(*result));
  }
}

void Recorder::find_gradients(const TtRecorded& in_rust) {
  const auto look = [&](bool is_argument, size_t leaf, const at::Tensor& t, const Gradient& before) {
    const auto& grad = t.grad();
    if (!grad.defined() && !before.defined) return;
    auto gradient = place(grad, in_rust);
    const bool is_new = gradient && gradient->kind == Result::kKept;
    if (!is_new && grad.defined() && before.defined && identity(grad) == before.context) return;
    if (!gradient) return hinder("a gradient is a tensor that the call neither made nor was given");
    call_.gradients.push_back({is_argument, leaf, std::move(*gradient)});
  };
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto& t = arguments_[i];
    if (!is_tandem(t) || !t.is_leaf()) continue;
    Gradient before;
    before.defined = call_.arguments[i].has_gradient, before.context = call_.arguments[i].gradient;
    look(true, i, t, before);
  }
  for (size_t i = 0; i < call_.watched.size(); i++) {
    const auto& w = call_.watched[i];
    if (!w.is_leaf) continue;
    if (auto t = w.tensor.lock()) look(false, i, at::Tensor(std::move(t)), w.gradient);
  }
}

int64_t Recorder::finish(at::TensorList results) {
  std::vector<bool> consumed;
  for (const auto& t : results) consumed.push_back(t.defined() && t.requires_grad() && is_consumed(t));
  // The graphs may be all that keeps tensors alive.
  consumed_.clear();
  TtRecorded in_rust{};
  tt_record_end(&in_rust);
  find_given(in_rust);
  keep_watched();
  find_fed(in_rust.id, in_rust.n_hosts);
  find_results(results, consumed, in_rust);
  find_gradients(in_rust);
  if (!host_.hindrance.empty()) hinder(host_.hindrance);
  call_.host_reads = host_.take_reads();
  std::vector<bool> owned;
  for (size_t i = 0; i < in_rust.n_kept; i++) owned.push_back(!in_rust.kept[i].is_kept);
  for (const auto& result : call_.results)
    if (result.kind == Result::kKept) owned[result.index] = true;
  for (const auto& left : call_.gradients)
    if (left.gradient.kind == Result::kKept) owned[left.gradient.index] = true;
  for (size_t i = 0; i < owned.size(); i++)
    if (!owned[i]) tt_record_keeps(in_rust.id, in_rust.kept[i].storage);
  all.emplace(in_rust.id, std::make_shared<const Recorded>(std::move(call_)));
  return in_rust.id;
}

// Ends the recording even if an operator of the recorder itself fails.
struct Ended {
  ~Ended() {
    is_recording = false;
    effects = nullptr;
    recorder.reset();
  }
};

void begin_recording(at::TensorList arguments, at::TensorList reached, int64_t before) {
  TORCH_CHECK(!is_recording && tt_is_program(), "a call is recorded already, or by another thread");
  settle_all();
  recorder = std::make_unique<Recorder>(arguments, reached, find_recorded(before).get());
  tt_record_begin();
  is_recording = true;
}

int64_t end_recording(at::TensorList results) {
  const Ended guard;
  is_recording = false;
  TORCH_CHECK(recorder, "no call is recorded");
  return recorder->finish(results);
}

void cancel_recording() {
  const Ended guard;
  tt_record_cancel();
}

std::string hindrance(int64_t id) {
  const auto call = find_recorded(id);
  return call ? call->hindrance : "";
}

void drop(int64_t id) { all.erase(id); }

std::string unequal(int64_t one, int64_t two) {
  const auto a = find_recorded(one), b = find_recorded(two);
  return a && b ? difference(*a, *b) : "";
}

}  // namespace

std::shared_ptr<const Recorded> find_recorded(int64_t id) {
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

void note_hindrance(const char* why) {
  if (recorder && tt_is_program()) recorder->hinder(why);
}

void note_consumed(const torch::autograd::Edge& root) {
  if (recorder && tt_is_program()) recorder->consume(root);
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("record(Tensor?[] arguments, Tensor[] reached, int before) -> ()");
  m.def("end_recording(Tensor?[] results) -> int");
  m.def("may_record() -> bool", [] { return !is_recording && tt_is_program(); });
  m.def("cancel_recording() -> ()", cancel_recording);
  m.def("hindrance(int recording) -> str", hindrance);
  m.def("unequal(int one, int two) -> str", unequal);
  m.def("drop_recording(int recording) -> ()", drop);
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) {
  m.impl("record", [](const c10::List<std::optional<at::Tensor>>& arguments, at::TensorList reached, int64_t before) {
    begin_recording(undefined_for_none(arguments), reached, before);
  });
  m.impl("end_recording", [](const c10::List<std::optional<at::Tensor>>& results) {
    return end_recording(undefined_for_none(results));
  });
}

}  // namespace tandem
