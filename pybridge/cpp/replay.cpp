// Replays of recorded calls of functions.
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd_nodes.h"
#include "device_type.h"
#include "errors.h"
#include "function.h"
#include "recorded.h"
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
  Replay(const Recorded& call, at::TensorList arguments) : call_(call), arguments_(arguments) {}

  // Whether the call may be replayed now. Finds the storages of its template.
  const char* hindrance();
  // Sends the template's runs. Returns false if the template is no longer valid.
  bool send(int64_t id);
  Tensors take_results();

 private:
  const char* find_watched();
  const char* find_given();
  void find_fed();
  at::Tensor tensor(const Result& result);
  c10::Storage kept(size_t number, c10::DeviceIndex device);

  const Recorded& call_;
  at::TensorList arguments_;
  std::vector<at::Tensor> watched_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> captured_;
  std::vector<TtGiven> given_;
  std::vector<TtFed> fed_;
  std::vector<TtKept> made_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> on_kept_;
};

const char* Replay::hindrance() {
  if (!(call_.modes == Modes::now())) return "a setting of PyTorch (grad mode, autocast, default dtype, ...) differs";
  if (arguments_.size() != call_.arguments.size()) return "the number of tensors differs";
  for (size_t i = 0; i < arguments_.size(); i++)
    if (!call_.arguments[i].accepts(arguments_[i], arguments_)) return "the metadata of an argument differs";
  for (const auto& read : call_.host_reads)
    if (read.version.current_version() != read.at) return "a host tensor that it reads has been written";
  if (const auto* why = find_watched()) return why;
  if (const auto* why = find_given()) return why;
  find_fed();
  return nullptr;
}

const char* Replay::find_watched() {
  watched_.reserve(call_.watched.size());
  for (const auto& known : call_.watched) {
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
  given_.reserve(call_.given.size());
  for (const auto& known : call_.given) {
    switch (known.kind) {
      case Given::kArgument: {
        const auto& t = arguments_[known.index];
        given_.push_back({storage_context(t), t.storage_offset()});
        break;
      }
      case Given::kGradient: {
        const auto& grad = watched_[known.index].grad();
        if (!grad.defined()) return "a gradient is None";
        if (!call_.watched[known.index].gradient.window->is_of(grad)) return "a gradient has another shape";
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
  for (size_t i = 0; i < call_.fed.size(); i++) {
    const auto& fed = call_.fed[i];
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

bool Replay::send(int64_t id) {
  TtReplayed sent{};
  check(tt_replay(id, given_.data(), given_.size(), fed_.data(), fed_.size(), &sent));
  if (sent.is_stale) return false;
  made_.assign(sent.kept, sent.kept + sent.n_kept);
  return true;
}

// Returns the storage that the replay made in place of one that the recorded call had made.
c10::Storage Replay::kept(size_t number, c10::DeviceIndex device) {
  auto& known = on_kept_[number];
  if (!known) {
    const auto& made = made_[number];
    known = adopt_storage(made.storage, made.address, made.nbytes, device);
  }
  return c10::Storage(known);
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
      auto t = window(kept(result.index, result.window->device.index()), result.window->record(result.offset));
      const auto& version = t.unsafeGetTensorImpl()->version_counter();
      for (uint32_t i = 0; version.enabled() && i < result.version; i++) t.unsafeGetTensorImpl()->bump_version();
      return t;
    }
    case Result::kGiven: {
      const auto& from = call_.given[result.index];
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
  on_kept_.resize(made_.size());
  for (size_t i = 0; i < arguments_.size(); i++)
    if (arguments_[i].defined()) bump(arguments_[i], call_.argument_writes[i]);
  for (size_t i = 0; i < watched_.size(); i++) bump(watched_[i], call_.watched_writes[i]);
  Tensors results;
  results.reserve(call_.results.size());
  for (const auto& result : call_.results) {
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
  for (const auto& left : call_.gradients) {
    const auto& leaf = left.is_argument ? arguments_[left.leaf] : watched_[left.leaf];
    leaf.mutable_grad() = tensor(left.gradient);
  }
  return results;
}

// Replays a recorded call, whose template Rust has, with other tensor arguments. Returns nothing if the program's state
// differs from that of the recorded call in a way that could change what the call does.
std::optional<Tensors> replay(int64_t id, const Tensors& list) {
  const auto* call = find_recorded(id);
  if (!call || is_recording || !tt_is_program()) return no("the call is on another thread or is being recorded");
  const auto arguments = undefined_for_none(list);
  Replay replay(*call, arguments);
  if (const auto* why = replay.hindrance()) return no(why);
  if (!replay.send(id)) return no("the graph was begun anew");
  return replay.take_results();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("replay(int recording, Tensor?[] arguments) -> Tensor?[]?");
  m.def("not_replayed() -> str", [] { return reason; });
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) { m.impl("replay", replay); }

}  // namespace tandem
