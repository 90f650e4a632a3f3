// Between IValues and flat argument records.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <memory>
#include <vector>

#include "shim.h"

namespace tandem {

constexpr c10::DeviceType kTandem = c10::DeviceType::PrivateUse1;
inline const c10::DispatchKeySet kTandemKeys{c10::DispatchKey::PrivateUse1};

// Records of one call. Pointers in them are good while both the encoder and the IValues live.
class Encoder {
 public:
  // Tensors of several devices are refused.
  void encode(const c10::IValue* args, size_t n);

  // The same, one by one and without boxes: so many arguments, with so many tensors at most.
  // Tensors of several devices are refused unless the call may cross devices.
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
  // Where the call runs: on its first tandem tensor's device, else on the one that an argument names.
  c10::DeviceIndex device() const;
  // It draws from a generator whose state the program may read and set behind Tandem's back.
  bool draws_unordered() const { return draws_unordered_; }
  // Some host tensor with dimensions requires grad.
  bool host_requires_grad() const { return host_requires_grad_; }
  const std::vector<const at::Tensor*>& inputs() const { return inputs_; }
  // The tensor that flat input `i` was made from.
  const at::Tensor& input(size_t i) const { return *inputs_[i]; }

 private:
  TtArg encode_one(const c10::IValue& v);
  TtArg& next(TtTag tag);
  void add_int(int64_t i) { next(TT_INT).i = i; }
  void encode_tensor(const at::Tensor& t);
  void meet(const at::Tensor& t);

  // Of the tandem tensors, and of a device argument; -1 where there is none.
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

// One encoder for each depth of nested calls on this thread.
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

// Turns output records into tensors and values; storages shared by several outputs are made once.
class Decoder {
 public:
  Decoder(const TtOuts& outs, const Encoder& encoder) : outs_(outs), encoder_(encoder) {}

  c10::IValue next();
  // The next one, which is a tensor.
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

// Runs the encoded call of `op` (an id of declare()) through Rust; the outputs are good until this thread's next call.
TtOuts run(uint32_t op, const Encoder& encoder);

// The storage context of a tandem tensor, made where the storage has none.
void* storage_context(const at::Tensor& t);
// A storage implementation around a context that Rust made on a device.
c10::intrusive_ptr<c10::StorageImpl> adopt_storage(void* context, void* address, size_t nbytes,
                                                   c10::DeviceIndex device);

// Throws the exception that waits in this thread's pending slot.
[[noreturn]] void throw_pending();
inline void check(int32_t status) {
  if (status != TT_OK) throw_pending();
}

// Runs `op` (an id of declare()) on a boxed stack, through Rust.
void dispatch(uint32_t op, const c10::OperatorHandle& handle, torch::jit::Stack* stack);
// Gets the elements of the last tensor among the encoded arguments to `to` where they lie without gaps; false where `op`
// ran as ever, and then values that are no tensors are in host_values().
bool fetch(uint32_t op, const Encoder& encoder, void* to, size_t nbytes);
uint32_t declare(const c10::OperatorHandle& handle);
const c10::OperatorHandle& handle_of(uint32_t op);
std::vector<c10::IValue>& host_values();
// How many of a call's first inputs are looked through for a tensor that is given twice.
constexpr size_t kCompared = 16;
// The tensors of a call's written list that PyTorch's kernel had written when it last failed on this thread.
uint32_t& written_before_failure();
// Lets the gradient of a host tensor that an op was fed with arrive from a device of ours.
void accept_device_gradient(const at::Tensor& host, c10::DeviceIndex device);

}  // namespace tandem
