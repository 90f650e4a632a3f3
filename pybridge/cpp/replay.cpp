// Replays of recorded calls of functions.
#include <ATen/core/ivalue.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autograd_nodes.h"
#include "device_type.h"
#include "errors.h"
#include "function.h"
#include "recorded.h"
#include "settling.h"
#include "storage.h"

namespace tandem {

namespace {

using Tensors = c10::List<std::optional<at::Tensor>>;

// Why the last replay was not possible; empty if it was.
std::string reason;

std::optional<Tensors> no(const char* why) {
  reason = why;
  return std::nullopt;
}

// The program's tensors that a replay uses, held while it runs.
class Replay {
 public:
  Replay(std::shared_ptr<const Recorded> call, int64_t id, std::vector<at::Tensor> arguments)
      : call_(std::move(call)), id_(id), arguments_(std::move(arguments)) {}

  // Why the call may not be replayed now, or null. Finds the storages of its template.
  const char* hindrance();
  enum Sent { kAll, kStale, kFailed, kElsewhere };
  // Sends the template's runs. Stops if the template is no longer valid (`kStale`), if a value that the call reads
  // depends on an operator that has failed (`kFailed`), or if it is not the recorded one (`kElsewhere`).
  Sent send();
  // Goes on where another replay has stopped, if the recorded call has done the same so far and has read the value that
  // the other replay has read. Returns whether it can.
  bool follow(const Replay& other);
  Tensors take_results();

  int64_t id() const { return id_; }
  // Number of values that were equal to the recorded ones.
  size_t stage() const { return stage_; }

 private:
  const char* find_watched();
  const char* find_given();
  void find_fed();
  bool send_stage();
  std::optional<TtScalar> read(const Read& read);
  at::Tensor tensor(const Result& result);

  std::shared_ptr<const Recorded> call_;
  int64_t id_;
  std::vector<at::Tensor> arguments_;
  std::vector<at::Tensor> watched_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> captured_;
  std::vector<TtGiven> given_;
  std::vector<TtFed> fed_;
  size_t stage_ = 0;
  // The value that was read last.
  TtScalar value_{};
  // Storages that were made in place of those that the recorded call had made and that last, and their contexts.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> made_;
  std::vector<void*> contexts_;
};

const char* Replay::hindrance() {
  if (!(call_->modes == Modes::now())) return "a setting of PyTorch (grad mode, autocast, default dtype, ...) differs";
  if (arguments_.size() != call_->arguments.size()) return "the number of tensors differs";
  for (size_t i = 0; i < arguments_.size(); i++)
    if (!call_->arguments[i].accepts(arguments_[i], arguments_)) return "the metadata of an argument differs";
  for (const auto& read : call_->host_reads)
    if (read.version.current_version() != read.at) return "a host tensor that it reads has been written";
  if (const auto* why = find_watched()) return why;
  if (const auto* why = find_given()) return why;
  find_fed();
  return nullptr;
}

const char* Replay::find_watched() {
  watched_.reserve(call_->watched.size());
  for (const auto& known : call_->watched) {
    auto impl = known.tensor.lock();
    if (!impl) return "a tensor that it uses no longer exists";
    const auto& t = watched_.emplace_back(std::move(impl));
    if (!known.is_same(t)) return "a tensor that it uses has another storage, shape or other hooks";
    if (known.is_leaf && t.grad().defined() != known.gradient.defined)
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
        if (!call_->watched[known.index].gradient.window->is_of(grad)) return "a gradient has another shape";
        given_.push_back({storage_context(grad), 0});
        break;
      }
      case Given::kCaptured: {
        auto storage = known.storage.lock();
        if (!storage || storage->mutable_data_ptr().get_context() != known.context)
          return "a tensor that it uses no longer exists";
        given_.push_back({known.context, 0});
        captured_.push_back(std::move(storage));
      }
    }
  }
  return nullptr;
}

void Replay::find_fed() {
  for (size_t i = 0; i < call_->fed.size(); i++) {
    const auto& fed = call_->fed[i];
    if (fed.kind == Fed::kConstant) continue;
    const bool is_argument = fed.kind == Fed::kArgument;
    const auto* storage = is_argument
        ? arguments_[fed.index].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
        : captured_.emplace_back(fed.storage.lock()).get();
    const auto base = is_argument ? arguments_[fed.index].storage_offset() : 0;
    TtTensor window{};
    window.storage = const_cast<c10::StorageImpl*>(storage);
    window.sizes = fed.window.sizes.data(), window.strides = fed.window.strides.data();
    window.ndim = static_cast<uint32_t>(fed.window.sizes.size());
    window.offset = fed.offset + base;
    window.dtype = static_cast<uint8_t>(fed.window.dtype), window.place = TT_HOST, window.flags = fed.window.flags;
    fed_.push_back({i, window});
  }
}

// Returns false if the template is no longer valid.
bool Replay::send_stage() {
  TtReplayed sent{};
  const auto& reads = call_->reads;
  const size_t from = stage_ == 0 ? 0 : reads[stage_ - 1].fed;
  const size_t to = stage_ == reads.size() ? call_->fed.size() : reads[stage_].fed;
  const auto is_before = [](const TtFed& fed, size_t number) { return fed.number < number; };
  const auto first = std::lower_bound(fed_.begin(), fed_.end(), from, is_before);
  const auto last = std::lower_bound(first, fed_.end(), to, is_before);
  const TtStage stage{id_,  stage_, given_.data(), given_.size(), fed_.data() + (first - fed_.begin()),
                      static_cast<size_t>(last - first), contexts_.data(), contexts_.size()};
  settle_all();
  check(tt_replay(&stage, &sent));
  if (sent.is_stale) return false;
  for (size_t i = 0; i < sent.n_kept; i++) {
    const auto& made = sent.kept[i];
    made_.push_back(adopt_storage(made.storage, made.address, made.nbytes, static_cast<c10::DeviceIndex>(made.device)));
  }
  return true;
}

// Returns nothing if an operator has failed: Python has to raise the error where the program reads the value.
std::optional<TtScalar> Replay::read(const Read& read) {
  try {
    return record_of(at::_local_scalar_dense(tensor(read.from)));
  } catch (const c10::Error&) {
  } catch (const std::runtime_error&) {
  }
  return std::nullopt;
}

Replay::Sent Replay::send() {
  for (const auto& reads = call_->reads;; stage_++) {
    if (!send_stage()) return kStale;
    if (stage_ == reads.size()) return kAll;
    for (size_t i = contexts_.size(); i < made_.size(); i++) contexts_.push_back(made_[i]->mutable_data_ptr().get_context());
    const auto value = read(reads[stage_]);
    if (!value) return kFailed;
    value_ = *value;
    if (!(value_ == reads[stage_].value)) return kElsewhere;
  }
}

bool Replay::follow(const Replay& other) {
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
  return true;
}

at::Tensor Replay::tensor(const Result& result) {
  switch (result.kind) {
    case Result::kUndefined:
      return at::Tensor();
    case Result::kArgument:
      return arguments_[result.index];
    case Result::kWatched:
      return watched_[result.index];
    case Result::kKept: {
      auto t = window(c10::Storage(made_[result.index]), result.window->record(result.offset));
      const auto& version = t.unsafeGetTensorImpl()->version_counter();
      for (uint32_t i = 0; version.enabled() && i < result.version; i++) t.unsafeGetTensorImpl()->bump_version();
      return t;
    }
    case Result::kGiven: {
      const auto& from = call_->given[result.index];
      if (from.kind == Given::kCaptured) {
        auto storage = c10::Storage(from.storage.lock());
        return window(std::move(storage), result.window->record(result.offset));
      }
      const auto& owner = from.kind == Given::kArgument ? arguments_[from.index] : watched_[from.index].grad();
      const auto base = from.kind == Given::kArgument ? owner.storage_offset() : 0;
      auto t = window(owner.storage(), result.window->record(result.offset + base));
      t.unsafeGetTensorImpl()->set_version_counter(owner.unsafeGetTensorImpl()->version_counter());
      return t;
    }
  }
  return at::Tensor();
}

void bump(const at::Tensor& t, uint32_t writes) {
  if (writes == 0 || !t.unsafeGetTensorImpl()->version_counter().enabled()) return;
  for (uint32_t i = 0; i < writes; i++) t.unsafeGetTensorImpl()->bump_version();
}

Tensors Replay::take_results() {
  for (size_t i = 0; i < arguments_.size(); i++)
    if (arguments_[i].defined()) bump(arguments_[i], call_->argument_writes[i]);
  for (size_t i = 0; i < watched_.size(); i++) bump(watched_[i], call_->watched_writes[i]);
  Tensors results;
  results.reserve(call_->results.size());
  for (const auto& result : call_->results) {
    auto t = tensor(result);
    if (result.requires_grad) {
      static const char* const message =
          "Trying to backward through the graph a second time: the function has already run the backward pass of this "
          "result";
      auto consumed = make_node<torch::autograd::Error>(std::string(message));
      const auto number = consumed->add_input_metadata(t);
      torch::autograd::impl::set_gradient_edge(t, {std::move(consumed), number});
    }
    results.push_back(t.defined() ? std::optional(std::move(t)) : std::nullopt);
  }
  for (const auto& left : call_->gradients) {
    const auto& leaf = left.is_argument ? arguments_[left.leaf] : watched_[left.leaf];
    leaf.mutable_grad() = tensor(left.gradient);
  }
  return results;
}

// The replay that has read another value than the recorded call.
std::unique_ptr<Replay> suspended;

std::optional<Tensors> run(Replay replay) {
  switch (replay.send()) {
    case Replay::kAll:
      return replay.take_results();
    case Replay::kStale:
      return no("the graph was begun anew");
    case Replay::kFailed:
      return no("an operator has failed");
    case Replay::kElsewhere:
      suspended = std::make_unique<Replay>(std::move(replay));
      return no("a value that it reads is another one");
  }
  return std::nullopt;
}

std::optional<Replay> begin(int64_t id, const Tensors& arguments) {
  const auto call = find_recorded(id);
  if (!call || is_recording || !tt_is_program()) {
    no("the call is on another thread or is being recorded");
    return std::nullopt;
  }
  Replay replay(call, id, undefined_for_none(arguments));
  if (const auto* why = replay.hindrance()) {
    no(why);
    return std::nullopt;
  }
  return replay;
}

// Replays a recorded call, whose template Rust has, with other tensor arguments. Returns nothing if the program's state
// differs from that of the recorded call in a way that could change what the call does, or if the call reads another
// value than the recorded one: then the replay is suspended.
std::optional<Tensors> replay(int64_t id, const Tensors& arguments) {
  auto replay = begin(id, arguments);
  return replay ? run(std::move(*replay)) : std::nullopt;
}

// Goes on with the suspended replay, as another recorded call that has read the other value. If it cannot, the replay
// stays suspended.
std::optional<Tensors> resume(int64_t id, const Tensors& arguments) {
  auto replay = begin(id, arguments);
  if (!replay || !suspended || !replay->follow(*suspended)) return std::nullopt;
  suspended.reset();
  return run(std::move(*replay));
}

// Returns the recording of the suspended replay, and the number of the value that was another one.
std::vector<int64_t> suspended_at() {
  if (!suspended) return {};
  return {suspended->id(), static_cast<int64_t>(suspended->stage())};
}

// Returns why a call cannot be replayed with these tensors; empty if it can.
std::string not_replayed(int64_t id, const Tensors& arguments) {
  return begin(id, arguments) ? "" : reason;
}

// The number of the tensor that a given storage belongs to: of an argument, or of a watched tensor that is on the storage or
// whose gradient is.
size_t owner_of(const Recorded& call, const Given& given) {
  if (given.kind != Given::kCaptured) return given.index;
  const auto owns = [&](const Watched& w) { return w.context == given.context; };
  return std::find_if(call.watched.begin(), call.watched.end(), owns) - call.watched.begin();
}

// Returns two numbers for each given storage: its kind (`Given::Kind`) and the number of its owner. The numbers of watched
// tensors are those of watched().
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

// Returns the number of the first given storage whose watched tensor no longer exists, or -1.
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

// Returns the captured tensors of a recorded call; None for those that no longer exist.
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

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("replay(int recording, Tensor?[] arguments) -> Tensor?[]?");
  m.def("resume(int recording, Tensor?[] arguments) -> Tensor?[]?");
  m.def("suspended() -> int[]", suspended_at);
  m.def("abandon() -> ()", [] { suspended.reset(); });
  m.def("not_replayed(int recording, Tensor?[] arguments) -> str");
  m.def("given(int recording) -> int[]", given);
  m.def("dead(int recording) -> int", dead);
  m.def("watched(int recording) -> Tensor?[]", watched);
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) { 
  m.impl("replay", replay);
  m.impl("resume", resume);
  m.impl("not_replayed", not_replayed);
}

}  // namespace tandem
