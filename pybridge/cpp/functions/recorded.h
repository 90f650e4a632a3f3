// The use that a call of a function makes of the program's tensors and of PyTorch's state.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "boundary/shim.h"
#include "functions/weak_tensor.h"

namespace tandem {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// PyTorch's settings that decide which operators a call issues.
struct Modes {
  static Modes now();
  bool operator==(const Modes& other) const;

  c10::DispatchKeySet included, excluded;
  bool grad, inference, deterministic, warn_only, fills, hooks, onednn, autocast_cache;
  // The enabled implementations of attention, a bit for each.
  uint32_t attention;
  c10::ScalarType autocast, default_dtype;
  int32_t threads;
};

// PyTorch's settings are those of `Modes`, as far as they belong to the process, while the object exists.
class ModesOfProcess {
 public:
  explicit ModesOfProcess(const Modes& modes) : before_(Modes::now()) { set(modes); }
  ~ModesOfProcess() { set(before_); }
  ModesOfProcess(const ModesOfProcess&) = delete;
  ModesOfProcess& operator=(const ModesOfProcess&) = delete;

 private:
  static void set(const Modes& modes);
  Modes before_;
};

// The metadata of a tensor.
struct TensorMetadata {
  explicit TensorMetadata(const at::Tensor& t);
  bool is_of(const at::Tensor& t) const;
  bool operator==(const TensorMetadata& other) const;
  // The record of a window with this metadata at an offset. The record points to the members.
  TtOut record(int64_t offset) const;

  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  c10::Device device;
  uint16_t flags;
};

// The dtype that the program has chosen for a leaf's gradient (`Tensor.grad_dtype`), if it has chosen one.
using GradientType = std::optional<c10::ScalarType>;

// The gradient of a leaf when a call begins.
struct Gradient {
  Gradient() = default;
  explicit Gradient(const at::Tensor& leaf);
  bool defined = false;
  // The context of the gradient's storage.
  void* context = nullptr;
  std::optional<TensorMetadata> window;
  int64_t offset = 0;
  uint32_t version = 0;
  bool requires_grad = false;
};

// A tensor that the program had before the call.
struct Watched {
  explicit Watched(const at::Tensor& t);
  // Whether the tensor is unchanged, except for its version and its gradient.
  bool is_same(const at::Tensor& t) const;

  WeakTensor tensor;
  WeakStorage storage;
  void* context;
  TensorMetadata window;
  int64_t offset;
  bool requires_grad, is_leaf;
  size_t hooks;
  GradientType grad_dtype;
  c10::VariableVersion version;
  uint32_t first_version;
  Gradient gradient;
};

// A tensor argument of a call.
struct Argument {
  Argument(const at::Tensor& t, at::TensorList all);
  bool equals(const Argument& other, bool reads_gradients) const;
  bool accepts(const at::Tensor& t, at::TensorList all, bool reads_gradients) const;

  // The number of the first argument on the storage of `t`. `t` is an argument itself.
  static size_t first_on(const at::Tensor& t, at::TensorList all);
  // The number of the first argument that is `t`. `first` is the first one on its storage.
  static size_t first_same(const at::Tensor& t, at::TensorList all, size_t first);

  // Whether the call has not changed the argument's metadata.
  bool is_unchanged(const at::Tensor& t) const;

  bool defined;
  std::optional<TensorMetadata> window;
  // The context of the argument's storage, and the argument's offset there, when the call began.
  void* context;
  int64_t offset;
  bool requires_grad, is_leaf;
  // Whether the argument was made in inference mode, so that it cannot be saved for a backward pass.
  bool is_inference = false;
  Gradient gradient;
  size_t hooks;
  GradientType grad_dtype;
  // Whether the call depends on the offset.
  bool has_fixed_offset = false;
  // The first argument on the same storage, and the distance from its offset in elements.
  size_t first;
  int64_t distance;
  // The first argument that is the same tensor. Not set for a backward pass, which runs no code of the program.
  std::optional<size_t> same;
};

// A storage that existed before the call.
struct Given {
  // kSaved: in a backward pass, a storage that the call has made.
  enum Kind { kCaptured, kArgument, kGradient, kSaved } kind;
  // The number of the argument, of the element of `watched` whose gradient it is, or of the storage among the lasting
  // storages that the call has made.
  size_t index;
  WeakStorage storage;
  void* context;
  // The offset to which the offsets of windows on the storage are relative.
  int64_t base;
};

// A host tensor that is fed to an op.
struct Fed {
  explicit Fed(const at::Tensor& t);
  enum Kind { kConstant, kArgument, kCaptured } kind = kConstant;
  size_t index = 0;
  WeakStorage storage;
  TensorMetadata window;
  int64_t offset;
  // TT_ZERO, on which the operator's variant depends.
  bool is_zero;
  c10::VariableVersion version;
  // Whether the memory is PyTorch's, and not another library's.
  bool is_own;
  // Whether the tensor stands for a Python number. A graph may keep such a tensor.
  bool is_number;
  // Whether the tensor still exists when the recording ends.
  bool is_kept = false;
};

// The base of a result in autograd, to which the gradients of the base's views belong.
struct View {
  // The number of the base in `Recorded::bases`.
  size_t base;
  // Whether the result is the base itself. Otherwise, how the view was made.
  bool is_base;
  torch::autograd::CreationMeta creation;

  bool operator==(const View& other) const {
    return base == other.base && is_base == other.is_base && creation == other.creation;
  }
};

// A tensor that a call returns, a gradient that it sets, or a base of results.
struct Result {
  // kOnArgument, kOnWatched: a view of an argument or of a watched tensor whose storage no operator has used.
  enum Kind { kUndefined, kArgument, kWatched, kKept, kGiven, kOnArgument, kOnWatched } kind = kUndefined;
  // The number of the argument, of the watched tensor, of the lasting storage that the call made, or of the storage
  // that existed before the call.
  size_t index = 0;
  std::optional<TensorMetadata> window;
  // The offset. For a storage that existed before the call, relative to the argument's or watched tensor's offset.
  int64_t offset = 0;
  uint32_t version = 0;
  // The identity of the version counter.
  const void* counter = nullptr;
  bool requires_grad = false;
  // Whether the tensor was made in inference mode.
  bool is_inference = false;
  // Whether the call itself has run the backward pass of the result and freed its graph.
  bool is_consumed = false;
  // For a result with a graph: whether it may be changed in place, which PyTorch refuses for one of several views.
  torch::autograd::CreationMeta creation = torch::autograd::CreationMeta::DEFAULT;
  // Set for a result that is a view in autograd, or the base of another result.
  std::optional<View> view;
  // The first result that is the same tensor, if there is an earlier one. Autograd keeps a gradient as it is if nothing
  // else refers to the tensor.
  std::optional<size_t> same;

  bool operator==(const Result& other) const {
    return kind == other.kind && index == other.index && window == other.window && offset == other.offset &&
           requires_grad == other.requires_grad && is_inference == other.is_inference &&
           is_consumed == other.is_consumed && creation == other.creation && view == other.view && same == other.same;
  }
};

// A value that the call reads, and that decides how the call goes on.
struct Read {
  // The single element that is read, on a storage that the call has made or was given.
  Result from;
  TtScalar value;
  // Numbers of storages and host tensors that the call had been given before.
  size_t given, fed;
};

// A gradient that the call leaves in a leaf.
struct LeftGradient {
  // The leaf: an argument or a watched tensor.
  bool is_argument;
  size_t leaf;
  Result gradient;

  bool operator==(const LeftGradient& other) const {
    return is_argument == other.is_argument && leaf == other.leaf && gradient == other.gradient;
  }
};

// The tensor whose gradient an output of the call's backward pass is.
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
  // Number of the first watched tensors, which names in the code reach.
  size_t reached = 0;
  std::vector<Given> given;
  std::vector<Fed> fed;
  std::vector<Read> reads;
  // State that the call changes before the last value that it reads: storages that existed before the call, and whether
  // it has drawn random numbers.
  std::vector<size_t> undone;
  bool undoes_draws = false;
  std::vector<Result> results;
  // The bases of results. A view may stand for its base.
  std::vector<Result> bases;
  std::vector<LeftGradient> gradients;
  std::vector<WrittenGradient> written_gradients;
  // The contexts of the watched tensors' storages, in ascending order. No argument and no gradient may be on them.
  std::vector<void*> owned;
  // Number of times that the call has written each argument, and each watched tensor.
  std::vector<uint32_t> argument_writes, watched_writes;
  // The outputs of the backward pass, in order. Several outputs may be gradients of one tensor. Empty if no result
  // requires grad.
  std::vector<Target> targets;
  // The number of outputs of each of autograd's nodes.
  std::vector<size_t> steps;
  // The number of nodes of autograd that the call has made.
  uint64_t nodes = 0;
  // For each result that requires grad, the results with which it shares nodes of autograd.
  std::vector<uint64_t> joint_roots;
  // Whether the call depends on which tensors have gradients.
  bool reads_gradients = true;
  // Whether the call depends on elements of host tensors that it has made itself, other than Python numbers.
  bool uses_made_values = true;
  // The addresses of host tensors that the call increments by one. They only say which tensors it were when the call
  // ended.
  std::vector<int64_t> incremented;
  // The reason why the call cannot be replayed; empty if it can.
  std::string refusal;
};

// Returns a recording, or null.
std::shared_ptr<const Recorded> find_recorded(int64_t id);
bool operator==(const TtScalar& one, const TtScalar& two);
// Returns the record of a value. Returns nothing for a complex number, or an integer that does not fit 64 bits with
// sign.
std::optional<TtScalar> record_of(const at::Scalar& value);
// Returns how two calls differ in their use of the program's tensors; empty if they do not differ.
std::string difference(const Recorded& one, const Recorded& two);

// Returns the tensors of a list, with undefined tensors for None.
std::vector<at::Tensor> undefined_for_none(const c10::List<std::optional<at::Tensor>>& list);

// The number of times that a tensor's storage has been written, as far as PyTorch counts it.
uint32_t version_of(const at::Tensor& t);
// The pointer that identifies a tensor's storage in a call: the context of a tandem storage, or the address of a host
// storage.
void* identity(const at::Tensor& t);
// The first byte of a tensor's elements, and the byte after the last one, relative to the storage.
std::pair<int64_t, int64_t> extent(const at::Tensor& t);
// Whether two tensors on one storage may have elements in common.
bool may_overlap(const at::Tensor& one, const at::Tensor& two);

}  // namespace tandem
