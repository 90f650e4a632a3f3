// Replays of recorded calls of functions.
#include <ATen/core/ivalue.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/autograd_nodes.h"
#include "boundary/errors.h"
#include "calls/function.h"
#include "device/device_type.h"
#include "device/generator.h"
#include "device/settling.h"
#include "device/storage.h"
#include "functions/call_backward.h"
#include "functions/recorded.h"

namespace tandem {

namespace {

using Tensors = c10::List<std::optional<at::Tensor>>;

// The reason why the latest replay was not possible; empty if it was.
std::string reason;

std::optional<Tensors> no(const char* why) {
  reason = why;
  return std::nullopt;
}

void bump(const at::Tensor& t, uint32_t writes) {
  if (writes == 0 || !t.unsafeGetTensorImpl()->version_counter().enabled()) return;
  for (uint32_t i = 0; i < writes; i++) t.unsafeGetTensorImpl()->bump_version();
}

// A replay, which holds the program's tensors that it uses while it runs.
class Replay {
 public:
  Replay(std::shared_ptr<const Recorded> call, int64_t id, std::vector<at::Tensor> arguments)
      : call_(std::move(call)), id_(id), arguments_(std::move(arguments)) {}
  // Replays a backward pass. `saved` are the storages that the pass's call has made.
  Replay(std::shared_ptr<const Recorded> call, int64_t id, std::vector<at::Tensor> arguments,
         std::vector<c10::intrusive_ptr<c10::StorageImpl>> saved)
      : call_(std::move(call)),
        id_(id),
        arguments_(std::move(arguments)),
        saved_(std::move(saved)),
        is_backward_(true) {}

  // Returns the reason why the call may not be replayed now, or null. Finds the storages for the template.
  // `is_audit` also refuses what a replay would do right, but would be recorded in another way.
  const char* refusal(bool is_audit = false);
  enum Sent { kAll, kStale, kFailed, kElsewhere };
  // Sends the template's runs. Stops early in three cases: the template is no longer valid (`kStale`), a value that the
  // call reads depends on an operator that has failed (`kFailed`), or a value is not the recorded one (`kElsewhere`).
  Sent send();
  // Takes over from another replay that has stopped at a value. This is possible if the recorded call of this replay is
  // equal up to that value, and has read the value that the other replay has read. Returns whether it is possible.
  bool follow(Replay& other);
  // Restores the state that the replay has changed so far.
  void undo();
  std::vector<at::Tensor> take_results();

  int64_t id() const { return id_; }
  // Number of values so far that were the recorded ones.
  size_t stage() const { return stage_; }

 private:
  bool uses_tensor(size_t i) const;
  const char* find_watched();
  const char* find_given();
  const char* find_fed();
  bool shares_memory(bool is_audit);
  bool send_stage();
  at::Tensor bytes_of(size_t given) const;
  // Copies the state that the call changes before it reads a value.
  void save();
  std::optional<TtScalar> read(const Read& read);
  at::Tensor tensor(const Result& result);
  at::Tensor base(size_t number);
  // As `tensor`, but a view belongs to its base.
  at::Tensor result(const Result& result);

  std::shared_ptr<const Recorded> call_;
  int64_t id_;
  std::vector<at::Tensor> arguments_;
  std::vector<at::Tensor> watched_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> saved_, captured_;
  bool is_backward_ = false;
  std::vector<TtGiven> given_;
  std::vector<TtFed> fed_;
  size_t stage_ = 0;
  // Copies of storages that existed before the call, by number, and the generator's state.
  std::unordered_map<size_t, at::Tensor> saved_bytes_;
  at::Tensor generator_;
  // The latest value that was read.
  TtScalar value_{};
  // The first result on each storage that the call has made, by the storage's number. Later results on the storage
  // share its version counter.
  std::unordered_map<size_t, at::Tensor> results_on_;
  // The bases of results so far.
  std::vector<at::Tensor> bases_;
  // Storages made in place of the lasting storages of the recorded call, and their contexts.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> made_;
  std::vector<void*> contexts_;
};

const char* Replay::refusal(bool is_audit) {
  if (!(call_->modes == Modes::now())) return "a setting of PyTorch (grad mode, autocast, default dtype, ...) differs";
  if (arguments_.size() != call_->arguments.size()) return "the number of tensors differs";
  for (size_t i = 0; i < arguments_.size(); i++)
    if (!call_->arguments[i].accepts(arguments_[i], arguments_, call_->reads_gradients))
      return "the metadata of an argument differs";
  if (const auto* why = find_watched()) return why;
  if (const auto* why = find_given()) return why;
  if (shares_memory(is_audit))
    return "an argument or a gradient shares its memory with a tensor that the function uses";
  return find_fed();
}

// Whether a storage that replaces a recorded one has a second owner.
bool Replay::shares_memory(bool is_audit) {
  const auto is_owned = [&](void* context) {
    // Watched tensors of a backward pass may have other storages by now.
    const auto captures = [&](const Given& given) {
      return given.kind == Given::kCaptured && given.context == context;
    };
    return is_backward_ ? std::any_of(call_->given.begin(), call_->given.end(), captures)
                        : std::binary_search(call_->owned.begin(), call_->owned.end(), context);
  };
  std::vector<void*> gradients;
  for (size_t i = 0; i < call_->given.size(); i++)
    if (call_->given[i].kind == Given::kGradient) gradients.push_back(given_[i].storage);
  std::sort(gradients.begin(), gradients.end());
  if (std::adjacent_find(gradients.begin(), gradients.end()) != gradients.end()) return true;
  if (std::any_of(gradients.begin(), gradients.end(), is_owned)) return true;
  // If a gradient that the call does not use were on a captured storage, the recorder would take the storage for the
  // gradient's.
  const auto has_owned_gradient = [&](const at::Tensor& t) {
    return t.defined() && t.is_leaf() && t.grad().defined() && is_owned(identity(t.grad()));
  };
  if ((call_->reads_gradients || is_audit) && std::any_of(watched_.begin(), watched_.end(), has_owned_gradient))
    return true;
  if (is_audit && std::any_of(arguments_.begin(), arguments_.end(), has_owned_gradient)) return true;
  const auto is_saved = [&](void* context) {
    return std::any_of(saved_.begin(), saved_.end(), [&](const auto& storage) {
      return storage && storage->mutable_data_ptr().get_context() == context;
    });
  };
  return std::any_of(arguments_.begin(), arguments_.end(), [&](const at::Tensor& t) {
    auto* context = identity(t);
    return context &&
           (is_owned(context) || is_saved(context) || std::binary_search(gradients.begin(), gradients.end(), context));
  });
}

// Whether more than the storage of a watched tensor is used.
bool Replay::uses_tensor(size_t i) const {
  const auto is_given = [&](const Given& given) { return given.kind == Given::kGradient && given.index == i; };
  const auto is_result = [&](const Result& result) {
    return (result.kind == Result::kWatched || result.kind == Result::kOnWatched) && result.index == i;
  };
  const auto is_written = [&](const WrittenGradient& written) { return !written.is_argument && written.leaf == i; };
  return call_->watched_writes[i] > 0 || std::any_of(call_->given.begin(), call_->given.end(), is_given) ||
         std::any_of(call_->results.begin(), call_->results.end(), is_result) ||
         std::any_of(call_->written_gradients.begin(), call_->written_gradients.end(), is_written);
}

const char* Replay::find_watched() {
  watched_.reserve(call_->watched.size());
  for (size_t i = 0; i < call_->watched.size(); i++) {
    const auto& known = call_->watched[i];
    auto impl = known.tensor.lock();
    // A backward pass uses the storages that the tensors had when the call ended. The call's node holds them.
    if (is_backward_ && !(impl && known.is_same(at::Tensor(impl))) && !uses_tensor(i)) {
      watched_.emplace_back();
      continue;
    }
    if (!impl) return "a tensor that it uses no longer exists";
    const auto& t = watched_.emplace_back(std::move(impl));
    if (!known.is_same(t)) return "a tensor that it uses has another storage, shape or other hooks";
    if (call_->reads_gradients && known.is_leaf && t.grad().defined() != known.gradient.defined)
      return known.gradient.defined ? "a gradient is None" : "a gradient is not None";
  }
  return nullptr;
}

const char* Replay::find_given() {
  given_.reserve(call_->given.size());
  for (const auto& known : call_->given) {
    switch (known.kind) {
      case Given::kArgument: {
        const auto& t = arguments_[known.index];
        given_.push_back({storage_context(t), t.storage_offset()});
        break;
      }
      case Given::kGradient: {
        const auto& grad = watched_[known.index].grad();
        if (!grad.defined()) return "a gradient is None";
        const auto& before = call_->watched[known.index].gradient;
        if (!before.window->is_of(grad) || before.offset != grad.storage_offset())
          return "a gradient has another shape or offset";
        if (grad.is_inference()) return "a gradient was made in inference mode";
        if (before.requires_grad != grad.requires_grad()) return "a gradient itself requires grad, or no longer does";
        given_.push_back({storage_context(grad), 0});
        break;
      }
      case Given::kCaptured: {
        auto storage = known.storage.lock();
        if (!storage || storage->mutable_data_ptr().get_context() != known.context)
          return "a tensor that it uses no longer exists";
        given_.push_back({known.context, 0});
        captured_.push_back(std::move(storage));
        break;
      }
      case Given::kSaved: {
        const auto& storage = saved_[known.index];
        if (!storage) return "a tensor that the call has made no longer exists";
        given_.push_back({storage->mutable_data_ptr().get_context(), 0});
      }
    }
  }
  return nullptr;
}

const char* Replay::find_fed() {
  for (size_t i = 0; i < call_->fed.size(); i++) {
    const auto& fed = call_->fed[i];
    if (fed.kind == Fed::kConstant) continue;
    const bool is_argument = fed.kind == Fed::kArgument;
    auto captured = is_argument ? nullptr : fed.storage.lock();
    if (!is_argument && !captured) return "a host tensor that it uses no longer exists";
    const auto* storage = is_argument
                              ? arguments_[fed.index].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                              : captured_.emplace_back(std::move(captured)).get();
    const auto base = is_argument ? arguments_[fed.index].storage_offset() : 0;
    TtTensor window{};
    window.storage = const_cast<c10::StorageImpl*>(storage);
    window.sizes = fed.window.sizes.data(), window.strides = fed.window.strides.data();
    window.ndim = static_cast<uint32_t>(fed.window.sizes.size());
    window.offset = fed.offset + base;
    window.dtype = static_cast<uint8_t>(fed.window.dtype), window.place = TT_HOST, window.flags = fed.window.flags;
    fed_.push_back({i, window});
  }
  return nullptr;
}

// Sends the runs of the current stage. Returns false if the template is no longer valid.
bool Replay::send_stage() {
  TtReplayed sent{};
  const auto& reads = call_->reads;
  const size_t from = stage_ == 0 ? 0 : reads[stage_ - 1].fed;
  const size_t to = stage_ == reads.size() ? call_->fed.size() : reads[stage_].fed;
  const auto is_before = [](const TtFed& fed, size_t number) { return fed.number < number; };
  const auto first = std::lower_bound(fed_.begin(), fed_.end(), from, is_before);
  const auto last = std::lower_bound(first, fed_.end(), to, is_before);
  const TtStage stage{id_,
                      stage_,
                      given_.data(),
                      given_.size(),
                      fed_.data() + (first - fed_.begin()),
                      static_cast<size_t>(last - first),
                      contexts_.data(),
                      contexts_.size()};
  settle_all();
  check(tt_replay(&stage, &sent));
  if (sent.is_stale) return false;
  for (size_t i = 0; i < sent.n_kept; i++) {
    const auto& made = sent.kept[i];
    made_.push_back(adopt_storage(made.storage, made.address, made.nbytes, static_cast<c10::DeviceIndex>(made.device)));
  }
  return true;
}

// Reads a value. Returns nothing if an operator has failed, because Python has to raise the error where the program
// reads the value.
std::optional<TtScalar> Replay::read(const Read& read) {
  try {
    return record_of(at::_local_scalar_dense(tensor(read.from)));
  } catch (const c10::Error&) {
  } catch (const std::runtime_error&) {
  }
  return std::nullopt;
}

Replay::Sent Replay::send() {
  if (stage_ == 0) save();
  for (const auto& reads = call_->reads;; stage_++) {
    if (!send_stage()) return kStale;
    if (stage_ == reads.size()) return kAll;
    for (size_t i = contexts_.size(); i < made_.size(); i++)
      contexts_.push_back(made_[i]->mutable_data_ptr().get_context());
    const auto value = read(reads[stage_]);
    if (!value) return kFailed;
    value_ = *value;
    if (!(value_ == reads[stage_].value)) return kElsewhere;
  }
}

bool Replay::follow(Replay& other) {
  const auto number = other.stage_;
  const auto &ours = call_->reads, &theirs = other.call_->reads;
  if (ours.size() <= number || !(ours[number].value == other.value_)) return false;
  for (size_t i = 0; i <= number; i++)
    if (!(ours[i].from == theirs[i].from)) return false;
  const auto same_given = [](const TtGiven& a, const TtGiven& b) { return a.storage == b.storage && a.base == b.base; };
  const auto n_given = ours[number].given;
  if (!std::equal(given_.begin(), given_.begin() + n_given, other.given_.begin(), same_given)) return false;
  const auto same_fed = [](const TtFed& a, const TtFed& b) {
    return a.number == b.number && a.window.storage == b.window.storage && a.window.offset == b.window.offset;
  };
  const auto before = [&](const TtFed& fed) { return fed.number < ours[number].fed; };
  const auto n_fed = std::find_if_not(fed_.begin(), fed_.end(), before) - fed_.begin();
  const auto n_theirs = std::find_if_not(other.fed_.begin(), other.fed_.end(), before) - other.fed_.begin();
  if (n_fed != n_theirs || !std::equal(fed_.begin(), fed_.begin() + n_fed, other.fed_.begin(), same_fed)) return false;
  stage_ = number + 1, made_ = other.made_, contexts_ = other.contexts_;
  // In the other call, later numbers stand for different storages, which that call would have written after the value.
  for (const auto& [given, bytes] : other.saved_bytes_)
    if (given < n_given) saved_bytes_.emplace(given, bytes);
  generator_ = std::move(other.generator_);
  save();
  return true;
}

// The bytes of a storage as a tensor.
at::Tensor Replay::bytes_of(size_t given) const {
  const auto& known = call_->given[given];
  const auto storage = [&]() -> c10::Storage {
    switch (known.kind) {
      case Given::kArgument: return arguments_[known.index].storage();
      case Given::kGradient: return watched_[known.index].grad().storage();
      case Given::kSaved: return c10::Storage(saved_[known.index]);
      case Given::kCaptured: return c10::Storage(known.storage.lock());
    }
    return c10::Storage();
  }();
  return tandem::bytes_of(storage);
}

void Replay::save() {
  if (stage_ == call_->reads.size()) return;
  for (const size_t i : call_->undone)
    if (!saved_bytes_.count(i)) saved_bytes_.emplace(i, bytes_of(i).clone());
  if (call_->undoes_draws && !generator_.defined()) generator_ = default_generator().get_state();
}

void Replay::undo() {
  for (const auto& [given, bytes] : saved_bytes_) bytes_of(given).copy_(bytes);
  if (generator_.defined()) {
    auto generator = default_generator();
    generator.set_state(generator_);
  }
}

// Returns a view of a tensor. It shares the tensor's version counter, and is an inference tensor if the tensor is one.
at::Tensor window_of(const at::Tensor& owner, const TtOut& record) {
  const c10::InferenceMode mode(owner.is_inference());
  auto t = window(owner.storage(), record);
  t.unsafeGetTensorImpl()->set_version_counter(owner.unsafeGetTensorImpl()->version_counter());
  return t;
}

at::Tensor Replay::tensor(const Result& result) {
  switch (result.kind) {
    case Result::kUndefined: return at::Tensor();
    case Result::kArgument: return arguments_[result.index];
    case Result::kWatched: return watched_[result.index];
    case Result::kOnArgument: {
      const auto& owner = arguments_[result.index];
      return window_of(owner, result.window->record(result.offset + owner.storage_offset()));
    }
    case Result::kOnWatched: {
      const auto& owner = watched_[result.index];
      return window_of(owner, result.window->record(result.offset + owner.storage_offset()));
    }
    case Result::kKept: {
      const c10::InferenceMode mode(result.is_inference);
      auto t = window(c10::Storage(made_[result.index]), result.window->record(result.offset));
      const auto [first, is_new] = results_on_.emplace(result.index, t);
      if (is_new)
        bump(t, result.version);
      else
        t.unsafeGetTensorImpl()->set_version_counter(first->second.unsafeGetTensorImpl()->version_counter());
      return t;
    }
    case Result::kGiven: {
      const auto& from = call_->given[result.index];
      if (from.kind == Given::kCaptured) {
        const auto owns = [&](const at::Tensor& owner) { return identity(owner) == from.context; };
        const auto owner = std::find_if(watched_.begin(), watched_.end(), owns);
        return owner == watched_.end() ? window(c10::Storage(from.storage.lock()), result.window->record(result.offset))
                                       : window_of(*owner, result.window->record(result.offset));
      }
      if (from.kind == Given::kSaved)
        return window(c10::Storage(saved_[from.index]), result.window->record(result.offset));
      const auto& owner = from.kind == Given::kArgument ? arguments_[from.index] : watched_[from.index].grad();
      const auto base = from.kind == Given::kArgument ? owner.storage_offset() : 0;
      return window_of(owner, result.window->record(result.offset + base));
    }
  }
  return at::Tensor();
}

at::Tensor Replay::base(size_t number) {
  if (!bases_[number].defined()) bases_[number] = tensor(call_->bases[number]);
  return bases_[number];
}

at::Tensor Replay::result(const Result& result) {
  if (!result.view) return tensor(result);
  const auto base = this->base(result.view->base);
  if (result.view->is_base) return base;
  return torch::autograd::as_view(base, tensor(result), /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/true,
                                  /*view_func=*/nullptr, /*rev_view_func=*/nullptr, result.view->creation);
}

std::vector<at::Tensor> Replay::take_results() {
  bases_.resize(call_->bases.size());
  for (size_t i = 0; i < arguments_.size(); i++)
    if (arguments_[i].defined()) bump(arguments_[i], call_->argument_writes[i]);
  for (size_t i = 0; i < watched_.size(); i++)
    if (watched_[i].defined()) bump(watched_[i], call_->watched_writes[i]);
  for (const auto& written : call_->written_gradients)
    bump((written.is_argument ? arguments_ : watched_)[written.leaf].grad(), written.writes);
  std::vector<at::Tensor> results;
  results.reserve(call_->results.size());
  for (const auto& result : call_->results) {
    if (result.same) {
      results.push_back(results[*result.same]);
      continue;
    }
    auto t = this->result(result);
    if (result.is_consumed) {
      static const char* const message =
          "Trying to backward through the graph a second time: the function has already run the backward pass of this "
          "result";
      auto consumed = make_node<torch::autograd::Error>(std::string(message));
      const auto number = consumed->add_input_metadata(t);
      torch::autograd::impl::set_gradient_edge(t, {std::move(consumed), number});
    }
    results.push_back(std::move(t));
  }
  for (const auto& left : call_->gradients) {
    const auto& leaf = left.is_argument ? arguments_[left.leaf] : watched_[left.leaf];
    leaf.mutable_grad() = tensor(left.gradient);
  }
  if (!call_->targets.empty()) {
    results_on_.clear(), bases_.clear();
    attach_replayed({call_, id_, std::move(arguments_), std::move(watched_), std::move(made_)}, results);
  }
  return results;
}

// The replay that has stopped because it has read another value than the recorded call.
std::unique_ptr<Replay> suspended;

std::optional<Tensors> run(Replay replay) {
  switch (replay.send()) {
    case Replay::kAll: {
      Tensors results;
      for (auto& t : replay.take_results()) results.push_back(t.defined() ? std::optional(std::move(t)) : std::nullopt);
      return results;
    }
    case Replay::kStale: replay.undo(); return no("the graph was begun anew");
    case Replay::kFailed: replay.undo(); return no("an operator has failed");
    case Replay::kElsewhere:
      suspended = std::make_unique<Replay>(std::move(replay));
      return no("a value that it reads is another one");
  }
  return std::nullopt;
}

std::optional<Replay> begin(int64_t id, const Tensors& arguments, bool is_audit = false) {
  const auto call = find_recorded(id);
  if (!call || is_recording || !tt_is_program()) {
    no("the call is on another thread or is being recorded");
    return std::nullopt;
  }
  Replay replay(call, id, undefined_for_none(arguments));
  if (const auto* why = replay.refusal(is_audit)) {
    no(why);
    return std::nullopt;
  }
  return replay;
}

// Replays a recorded call, whose template Rust has, with other tensor arguments. Returns nothing in two cases:
//
// - The program's state differs from the state at the recorded call in a way that could change what the call does.
// - The call reads another value than the recorded call. The replay is then suspended.
std::optional<Tensors> replay(int64_t id, const Tensors& arguments) {
  auto replay = begin(id, arguments);
  return replay ? run(std::move(*replay)) : std::nullopt;
}

// Replays a recorded call as `replay` does, and then increments each counter as often as the recorded call.
std::optional<Tensors> replay_counting(int64_t id, const Tensors& arguments, at::TensorList counters,
                                       at::IntArrayRef increments) {
  auto results = replay(id, arguments);
  // The replay has counted the writes of the tensors that names reach, which the counters are.
  for (size_t i = 0; results && i < counters.size(); i++) counters[i].variable_data().add_(increments[i]);
  return results;
}

// Resumes the suspended replay with another recorded call, which has read the other value. Returns nothing, and leaves
// the replay suspended, if that call cannot take over.
std::optional<Tensors> resume(int64_t id, const Tensors& arguments) {
  auto replay = begin(id, arguments);
  if (!replay || !suspended || !replay->follow(*suspended)) return std::nullopt;
  suspended.reset();
  return run(std::move(*replay));
}

// Returns the recording of the suspended replay, and the number of the value at which it stopped.
std::vector<int64_t> suspended_at() {
  if (!suspended) return {};
  return {suspended->id(), static_cast<int64_t>(suspended->stage())};
}

// Returns the reason why a call cannot be replayed with these tensors; empty if it can.
std::string not_replayed(int64_t id, const Tensors& arguments) {
  return begin(id, arguments, /*is_audit=*/true) ? "" : reason;
}

// The number of the tensor that owns a storage which existed before the call: an argument, or a watched tensor that is
// on the storage or whose gradient is.
size_t owner_of(const Recorded& call, const Given& given) {
  if (given.kind != Given::kCaptured) return given.index;
  const auto owns = [&](const Watched& w) { return w.context == given.context; };
  return std::find_if(call.watched.begin(), call.watched.end(), owns) - call.watched.begin();
}

// Returns two numbers for each storage that existed before the call: the storage's kind (`Given::Kind`), and the number
// of its owner. Watched tensors are numbered as in watched().
std::vector<int64_t> given(int64_t id) {
  std::vector<int64_t> numbers;
  const auto call = find_recorded(id);
  if (!call) return numbers;
  for (const auto& g : call->given) {
    numbers.push_back(g.kind);
    numbers.push_back(static_cast<int64_t>(owner_of(*call, g)));
  }
  return numbers;
}

// Returns the number of the first storage that existed before the call and whose watched tensor is gone, or -1.
int64_t dead(int64_t id) {
  const auto call = find_recorded(id);
  if (!call) return -1;
  for (size_t i = 0; i < call->given.size(); i++) {
    const auto& g = call->given[i];
    if (g.kind == Given::kArgument) continue;
    const auto owner = owner_of(*call, g);
    if (owner == call->watched.size() || call->watched[owner].tensor.expired()) return static_cast<int64_t>(i);
  }
  return -1;
}

// Returns the watched tensors of a recorded call, with None for tensors that are gone.
Tensors watched(int64_t id) {
  Tensors tensors;
  const auto call = find_recorded(id);
  if (!call) return tensors;
  for (const auto& w : call->watched) {
    auto impl = w.tensor.lock();
    tensors.push_back(impl ? std::optional(at::Tensor(std::move(impl))) : std::nullopt);
  }
  return tensors;
}

}  // namespace

std::optional<std::vector<at::Tensor>> replay_backward(int64_t pass, std::vector<at::Tensor> arguments,
                                                       const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& saved,
                                                       const std::function<void()>& check) {
  const auto call = find_recorded(pass);
  if (!call || !tt_is_program()) return std::nullopt;
  Replay replay(call, pass, std::move(arguments), saved);
  if (replay.refusal()) return std::nullopt;
  check();
  if (replay.send() != Replay::kAll) return std::nullopt;
  return replay.take_results();
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("replay(int recording, Tensor?[] arguments) -> Tensor?[]?");
  m.def("replay_counting(int recording, Tensor?[] arguments, Tensor[] counters, int[] increments) -> Tensor?[]?");
  m.def("resume(int recording, Tensor?[] arguments) -> Tensor?[]?");
  m.def("suspended() -> int[]", suspended_at);
  m.def("abandon() -> ()", [] {
    if (const auto abandoned = std::move(suspended)) abandoned->undo();
  });
  m.def("not_replayed(int recording, Tensor?[] arguments) -> str");
  m.def("given(int recording) -> int[]", given);
  m.def("dead(int recording) -> int", dead);
  m.def("watched(int recording) -> Tensor?[]", watched);
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) {
  m.impl("replay", replay);
  m.impl("replay_counting", replay_counting);
  m.impl("resume", resume);
  m.impl("not_replayed", not_replayed);
}

}  // namespace tandem
