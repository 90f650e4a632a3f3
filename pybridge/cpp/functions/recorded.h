// What a call of a function uses of the program's tensors and of PyTorch's state.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "boundary/shim.h"

namespace tandem {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// PyTorch's settings that decide which operators a call issues.
struct Modes {
  static Modes now();
  bool operator==(const Modes& other) const;

  c10::DispatchKeySet included, excluded;
  bool grad, inference, deterministic, warn_only, fills, hooks;
  c10::ScalarType autocast, default_dtype;
  int32_t threads;
};

// The metadata of a tensor.
struct Window {
  explicit Window(const at::Tensor& t);
  bool is_of(const at::Tensor& t) const;
  bool operator==(const Window& other) const;
  // The record of this window at an offset. It points to the members.
  TtOut record(int64_t offset) const;

  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  c10::Device device;
  uint16_t flags;
};

// The gradient of a leaf when a call begins.
struct Gradient {
  Gradient() = default;
  explicit Gradient(const at::Tensor& leaf);
  bool defined = false;
  // The context of its storage.
  void* context = nullptr;
  std::optional<Window> window;
  int64_t offset = 0;
  uint32_t version = 0;
};

// A tensor that the program had before the call.
struct Watched {
  explicit Watched(const at::Tensor& t);
  // Whether the tensor is as it was, except for its version and its gradient.
  bool is_same(const at::Tensor& t) const;

  WeakTensor tensor;
  WeakStorage storage;
  void* context;
  Window window;
  int64_t offset;
  bool requires_grad, is_leaf;
  size_t hooks;
  c10::VariableVersion version;
  uint32_t first_version;
  Gradient gradient;
};

// A tensor argument of a call.
struct Argument {
  Argument(const at::Tensor& t, at::TensorList all);
  bool equals(const Argument& other, bool reads_gradients) const;
  bool accepts(const at::Tensor& t, at::TensorList all, bool reads_gradients) const;

  // The first argument on the storage of `t`, which is one of them.
  static size_t first_on(const at::Tensor& t, at::TensorList all);

  // Whether the call has left the argument's metadata as they were.
  bool is_unchanged(const at::Tensor& t) const;

  bool defined;
  std::optional<Window> window;
  // The context of its storage, and its offset there, when the call began.
  void* context;
  int64_t offset;
  bool requires_grad, is_leaf;
  // Whether it was made in inference mode, and cannot be saved for a backward pass.
  bool is_inference = false;
  Gradient gradient;
  size_t hooks;
  // The first argument on the same storage, and the distance from it in elements.
  size_t first;
  int64_t distance;
};

// A storage that existed before the call.
struct Given {
  // kSaved: in a backward pass, a storage that the call has made.
  enum Kind { kCaptured, kArgument, kGradient, kSaved } kind;
  // The argument, the element of `watched` whose gradient it is, or the number among the storages that the call has made
  // and that last.
  size_t index;
  WeakStorage storage;
  void* context;
  // The offset that windows on it are relative to.
  int64_t base;
};

// A host tensor that is fed to an op.
struct Fed {
  explicit Fed(const at::Tensor& t);
  enum Kind { kConstant, kArgument, kCaptured } kind = kConstant;
  size_t index = 0;
  WeakStorage storage;
  Window window;
  int64_t offset;
  // TT_ZERO: the operator's variant depends on it.
  bool is_zero;
  // Whether the memory is PyTorch's, and not another library's.
  bool is_own;
  // Whether it stands for a number of Python's. A graph may keep it.
  bool is_number;
};

// A tensor that a call returns, or a gradient that it sets.
struct Result {
  enum Kind { kUndefined, kArgument, kWatched, kKept, kGiven } kind = kUndefined;
  // The argument, the watched tensor, the storage that the call made and that lasts, or the given storage.
  size_t index = 0;
  std::optional<Window> window;
  // The offset, relative to that of the argument for a given storage.
  int64_t offset = 0;
  uint32_t version = 0;
  bool requires_grad = false;
  // Whether the call itself has run the backward pass of the result and freed its graph.
  bool is_consumed = false;

  bool operator==(const Result& other) const {
    return kind == other.kind && index == other.index && window == other.window && offset == other.offset &&
           requires_grad == other.requires_grad && is_consumed == other.is_consumed;
  }
};

// A value that the call reads, which decides how it goes on.
struct Read {
  // A single element on a storage that the call has made or was given.
  Result from;
  TtScalar value;
  // Numbers of storages and host tensors that the call had been given.
  size_t given, fed;
};

// A gradient that the call leaves behind.
struct LeftGradient {
  // The leaf: an argument or a watched tensor.
  bool is_argument;
  size_t leaf;
  Result gradient;

  bool operator==(const LeftGradient& other) const {
    return is_argument == other.is_argument && leaf == other.leaf && gradient == other.gradient;
  }
};

// What an output of a call's backward pass is a gradient of.
struct Target {
  // An argument or a watched tensor.
  bool is_argument;
  size_t index;

  bool operator==(const Target& other) const { return is_argument == other.is_argument && index == other.index; }
};

// A gradient that existed before the call and that the call has written.
struct WrittenGradient {
  // The leaf: an argument or a watched tensor.
  bool is_argument;
  size_t leaf;
  uint32_t writes;
};

// A recorded call.
struct Recorded {
  Modes modes = Modes::now();
  std::vector<Argument> arguments;
  std::vector<Watched> watched;
  std::vector<Given> given;
  std::vector<Fed> fed;
  std::vector<Read> reads;
  // The given storages that the call has written before the last of these values, and whether it has drawn random numbers.
  std::vector<size_t> undone;
  bool undoes_draws = false;
  std::vector<Result> results;
  std::vector<LeftGradient> gradients;
  std::vector<WrittenGradient> written_gradients;
  // The contexts of the watched tensors' storages, in ascending order. No argument and no gradient may be on them.
  std::vector<void*> owned;
  // How often the call has written each argument, and each watched tensor.
  std::vector<uint32_t> argument_writes, watched_writes;
  // The outputs of the backward pass, in order. Several may be gradients of one tensor. Empty if no result requires grad.
  std::vector<Target> targets;
  // Whether the call depends on which tensors have gradients.
  bool reads_gradients = true;
  // Whether the call depends on elements of host tensors that it has made itself, beside numbers of Python's.
  bool uses_made_values = true;
  // Why the call cannot be replayed; empty if it can.
  std::string refusal;
};

// Returns a recording, or null.
std::shared_ptr<const Recorded> find_recorded(int64_t id);
bool operator==(const TtScalar& one, const TtScalar& two);
// Returns the record of a value, or nothing if it is complex or an integer beyond 64 bits with sign.
std::optional<TtScalar> record_of(const at::Scalar& value);
// Says how two calls differ in what they use of the program's tensors; empty if they do not.
std::string difference(const Recorded& one, const Recorded& two);

// Returns the tensors of a list, undefined ones for None.
std::vector<at::Tensor> undefined_for_none(const c10::List<std::optional<at::Tensor>>& list);

// The number of times that a tensor's storage has been written, as far as PyTorch counts it.
uint32_t version_of(const at::Tensor& t);
// The context of a tandem tensor's storage, or the storage of a host tensor: what identifies it in a call.
void* identity(const at::Tensor& t);

}  // namespace tandem
