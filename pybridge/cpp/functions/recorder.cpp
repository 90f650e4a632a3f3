#include "functions/recorder.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <tuple>

#include "boundary/errors.h"
#include "calls/function.h"
#include "device/settling.h"

namespace tandem {

Recorder::Recorder(at::TensorList arguments, at::TensorList reached, std::vector<void*> saved, at::TensorList counters)
    : arguments_(arguments.vec()), saved_(std::move(saved)), host_(counters) {
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

Recorder::Recorder(at::TensorList arguments, at::TensorList reached, at::TensorList counters, const Recorded* before,
                   bool reads_gradients)
    : Recorder(arguments, reached, std::vector<void*>(), counters) {
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
  for (const auto& known : before->watched) {
    auto t = known.is_leaf && known.requires_grad ? known.tensor.lock() : nullptr;
    if (t) watch(at::Tensor(std::move(t)));
  }
}

size_t Recorder::watch(const at::Tensor& t) {
  const auto [found, is_new] = seen_.emplace(t.unsafeGetTensorImpl(), call_.watched.size());
  const auto number = found->second;
  if (!is_new) return number;
  call_.watched.emplace_back(t);
  used_.push_back(0);
  // The program may make a new view for each use, but the base tensor is its own.
  if (const auto base = base_of(t); base.defined()) watch(base);
  return number;
}

at::Tensor Recorder::base_of(const at::Tensor& t) {
  if (!t.is_view()) return {};
  at::Tensor base(t._base());
  if (!base.unsafeGetTensorImpl()->is_python_dispatch()) return base;
  refuse("it uses a view of a tensor of a class with __torch_dispatch__. Return the values of such a tensor");
  return {};
}

void Recorder::use(const at::Tensor& t) {
  auto& used = used_[watch(t)];
  if (used != 0) return;
  used = ++uses_;
  if (const auto base = base_of(t); base.defined()) use(base);
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

void Recorder::use_offset(const at::Tensor& of) {
  const auto first = arguments_on_.find(identity(of));
  if (first == arguments_on_.end()) return;
  for (const size_t i : first->second) call_.arguments[i].has_fixed_offset = true;
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
  const auto [begin, end] = extent(t);
  return t.numel() == 0 || std::any_of(first->second.begin(), first->second.end(), [&](size_t i) {
           const auto [from, to] = extent(arguments_[i]);
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
    if (i >= reached_ && is_made_of_watched(at::Tensor(t))) continue;
    numbers[i] = kept.size();
    call_.reached += i < reached_;
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
      if (host_.is_counter(storage.get())) refuse("an operator on the device reads a host tensor that it counts with");
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
// Refuses calls that change tensors' metadata or PyTorch's settings, which a replay does not change.
void Recorder::find_changes() {
  if (!(call_.modes == Modes::now())) refuse("it changes a setting of PyTorch and leaves it changed");
  static const char* const why =
      "it changes a tensor in a way that is no operator (requires_grad_, .data, set_, a hook, or the shape in place). "
      "Do that outside of the function";
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto& t = arguments_[i];
    if (!call_.arguments[i].is_unchanged(t)) refuse(why);
    if (t.defined() && t.grad_fn().get() != argument_nodes_[i])
      refuse("it changes an argument in place that requires grad. Change a copy (clone())");
  }
  for (const auto& w : call_.watched)
    if (auto t = w.tensor.lock(); t && !w.is_same(at::Tensor(std::move(t)))) refuse(why);
}

namespace {

using Tensors = c10::List<std::optional<at::Tensor>>;

std::unique_ptr<Recorder> recorder;
// Whether a thread is recording a call. Operators run without the GIL, so several threads may try to record.
std::atomic<bool> is_taken{false};
std::mutex all_mutex;
std::unordered_map<int64_t, std::shared_ptr<const Recorded>> all;
}  // namespace

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
  for (const auto* t : host_.incremented()) call_.incremented.push_back(reinterpret_cast<int64_t>(t));
  call_.reads_gradients |= !call_.gradients.empty() || !call_.written_gradients.empty();
  auto graph = find_graph(results, has_backward);
  if (!graph && call_.refusal.empty()) refuse_kept(in_rust);
  if (graph) attach(in_rust.id, std::move(*graph), surroundings(results, in_rust), results);
  const std::lock_guard<std::mutex> lock(all_mutex);
  all.emplace(in_rust.id, std::make_shared<const Recorded>(std::move(call_)));
  return in_rust.id;
}

namespace {

// Ends the recording even if an operator of the recorder itself fails.
struct Ended {
  bool is_over = true;
  ~Ended() {
    if (!is_over) return;
    is_recording = false;
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

// Whether names in the code that was known when the calls began reach the same tensors.
bool reach_the_same(int64_t one, int64_t two) {
  const auto a = find_recorded(one), b = find_recorded(two);
  const auto same = [](const Watched& x, const Watched& y) { return x.tensor == y.tensor; };
  return a && b && a->reached == b->reached &&
         std::equal(a->watched.begin(), a->watched.begin() + static_cast<std::ptrdiff_t>(a->reached),
                    b->watched.begin(), same);
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

void note_offset(const at::Tensor& of) {
  if (recorder && tt_is_program()) recorder->use_offset(of);
}

void note_consumed(const torch::autograd::Edge& root) {
  if (recorder && tt_is_program()) recorder->consume(root);
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("record(Tensor?[] arguments, Tensor[] reached, Tensor[] counters, int before, bool reads_gradients) -> bool");
  // Returns the number of the recording, and the tensors to use in place of the results.
  m.def("end_recording(Tensor?[] results, bool attaches) -> (int, Tensor?[])");
  m.def("may_record() -> bool", [] { return !is_recording && tt_is_program(); });
  m.def("cancel_recording() -> ()", cancel_recording);
  m.def("refusal(int recording) -> str", refusal);
  m.def("unequal(int one, int two) -> str", unequal);
  m.def("reach_the_same(int one, int two) -> bool", reach_the_same);
  m.def("drop_recording(int recording) -> ()", drop);
  m.def("uses_made_values(int recording) -> bool", [](int64_t id) {
    const auto call = find_recorded(id);
    return !call || call->uses_made_values;
  });
  // Returns `_cdata` of the host tensors that the call only increments by one, if it writes no others.
  m.def("incremented(int recording) -> int[]", [](int64_t id) {
    const auto call = find_recorded(id);
    return call ? call->incremented : std::vector<int64_t>();
  });
  m.def("has_backward(int recording) -> bool", [](int64_t id) {
    const auto call = find_recorded(id);
    return call && !call->targets.empty();
  });
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) {
  m.impl("record", [](const Tensors& arguments, at::TensorList reached, at::TensorList counters, int64_t before,
                      bool reads_gradients) {
    return begin(undefined_for_none(arguments), reached, counters, find_recorded(before).get(), reads_gradients);
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
