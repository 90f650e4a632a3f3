// Conversion between IValues and flat argument records.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <memory>
#include <vector>

#include "shim.h"

namespace tandem {

// Builds the argument records of a call. Pointers in the records are valid as long as the encoder and the arguments.
class Encoder {
 public:
  // Encodes boxed arguments. Throws if tandem tensors are on different devices.
  void encode(const c10::IValue* args, size_t n);

  // Starts a call whose unboxed arguments are then added one by one: `n` arguments with at most `tensors` tensors.
  // Unless `may_cross` is set, add() throws if tandem tensors are on different devices.
  void begin(size_t n, size_t tensors, bool may_cross = false);
  void add(const at::Tensor& t);
  void add(const std::optional<at::Tensor>& t);
  void add(const at::ITensorListRef& list);
  void add(const c10::Scalar& s);
  void add(c10::SymIntArrayRef list);
  void add(at::OptionalIntArrayRef list);
  void add(const c10::SymInt& i) { add_int(i.guard_int(__FILE__, __LINE__)); }
  void add(int64_t i) { add_int(i); }
  void add(bool b);
  void add(double d);
  void add(std::optional<c10::ScalarType> type);

  const TtArg* args() const { return args_.data(); }
  size_t size() const { return args_.size(); }
  // The device that the call runs on: that of the first tandem tensor, else that of a device argument, else the current
  // device.
  c10::DeviceIndex device() const;
  // Whether the call draws from a generator whose state the program can read and set without Tandem noticing.
  bool draws_unordered() const { return draws_unordered_; }
  // Whether a host tensor with at least one dimension requires grad.
  bool host_requires_grad() const { return host_requires_grad_; }
  const std::vector<const at::Tensor*>& inputs() const { return inputs_; }
  // The tensor of flat input `i`.
  const at::Tensor& input(size_t i) const { return *inputs_[i]; }

 private:
  TtArg encode_one(const c10::IValue& v);
  TtArg& next(TtTag tag);
  void add_int(int64_t i) { next(TT_INT).i = i; }
  void encode_tensor(const at::Tensor& t);
  void meet(const at::Tensor& t);

  // Device of the first tandem tensor, and of a device argument; -1 if there is none.
  c10::DeviceIndex device_ = -1, named_ = -1;
  bool may_cross_ = false;
  bool host_requires_grad_ = false;
  bool draws_unordered_ = false;
  std::vector<TtArg> args_;
  std::vector<TtTensor> tensors_;
  std::vector<const at::Tensor*> inputs_;
  std::vector<int64_t> ints_;
  std::vector<double> floats_;
  std::vector<uint8_t> bools_;
  std::vector<TtArg> scalars_;
};

// Lends an encoder from a thread-local pool that has one per depth of nested calls.
class Lease {
 public:
  Lease() {
    if (pool.size() == depth) pool.push_back(std::make_unique<Encoder>());
    encoder_ = pool[depth++].get();
  }
  ~Lease() { depth--; }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Encoder* operator->() const { return encoder_; }
  Encoder& operator*() const { return *encoder_; }

 private:
  static thread_local std::vector<std::unique_ptr<Encoder>> pool;
  static thread_local size_t depth;
  Encoder* encoder_;
};

// Converts output records to tensors and values. A storage that several outputs share is created once.
class Decoder {
 public:
  Decoder(const TtOuts& outs, const Encoder& encoder) : outs_(outs), encoder_(encoder) {}

  c10::IValue next();
  // Returns the next output, which must be a tensor.
  at::Tensor next_tensor() { return tensor(outs_.outs[at_++]); }
  bool done() const { return at_ == outs_.n_outs; }

 private:
  at::Tensor tensor(const TtOut& out);
  c10::intrusive_ptr<c10::StorageImpl> storage(const TtOut& out);

  const TtOuts& outs_;
  const Encoder& encoder_;
  size_t at_ = 0;
  c10::SmallVector<std::pair<void*, c10::intrusive_ptr<c10::StorageImpl>>, 2> made_;
};

// Sends the encoded call of `op`, an id from declare(), to Rust. The outputs are valid until this thread's next call.
TtOuts run(uint32_t op, const Encoder& encoder);

// Returns the storage context of a tandem tensor. Creates one if the storage has none.
void* storage_context(const at::Tensor& t);
// Wraps a context that Rust created on a device in a StorageImpl.
c10::intrusive_ptr<c10::StorageImpl> adopt_storage(void* context, void* address, size_t nbytes,
                                                   c10::DeviceIndex device);

// Sends a call of `op`, an id from declare(), with boxed arguments to Rust, and replaces them with the results.
void dispatch(uint32_t op, const c10::OperatorHandle& handle, torch::jit::Stack* stack);
// Runs `op` and copies the elements of the last encoded tensor to `to` if that tensor is contiguous and has `nbytes`
// bytes. Returns false if `op` ran like any other op; outputs that are not tensors are then in host_values().
bool fetch(uint32_t op, const Encoder& encoder, void* to, size_t nbytes);
// Returns the id of an operator. The first call for an operator declares it to Rust.
uint32_t declare(const c10::OperatorHandle& handle);
const c10::OperatorHandle& handle_of(uint32_t op);
// Outputs of this thread's last call that are not tensors.
std::vector<c10::IValue>& host_values();
// Number of leading inputs of a call that each input is compared with, to set TT_SAME and TT_APART.
constexpr size_t kCompared = 16;
// Number of tensors of a written list that PyTorch's kernel had written when it last failed on this thread.
uint32_t& written_before_failure();
// Lets the gradient of a host tensor that was fed to an op arrive from a tandem device.
void accept_device_gradient(const at::Tensor& host, c10::DeviceIndex device);

}  // namespace tandem
