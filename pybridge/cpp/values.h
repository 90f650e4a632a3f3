// Between IValues and flat argument records.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <memory>
#include <vector>

#include "shim.h"

namespace tandem {

constexpr c10::DeviceType kTandem = c10::DeviceType::PrivateUse1;
inline const c10::DispatchKeySet kTandemKeys{c10::DispatchKey::PrivateUse1};

// Records of one call. Pointers in them are good while both the encoder and the IValues live.
class Encoder {
 public:
  void encode(const c10::IValue* args, size_t n);
  const TtArg* args() const { return args_.data(); }
  size_t size() const { return args_.size(); }
  // Some host tensor with dimensions requires grad.
  bool host_requires_grad() const { return host_requires_grad_; }
  const std::vector<const at::Tensor*>& inputs() const { return inputs_; }
  // The tensor that flat input `i` was made from.
  const at::Tensor& input(size_t i) const { return *inputs_[i]; }

 private:
  TtArg encode_one(const c10::IValue& v);
  void encode_tensor(const at::Tensor& t);

  bool host_requires_grad_ = false;
  std::vector<TtArg> args_;
  std::vector<TtTensor> tensors_;
  std::vector<const at::Tensor*> inputs_;
  std::vector<int64_t> ints_;
  std::vector<double> floats_;
  std::vector<uint8_t> bools_;
  std::vector<TtArg> scalars_;
};

// The storage context of a tandem tensor, made where the storage has none.
void* storage_context(const at::Tensor& t);
// A storage implementation around a context that Rust made.
c10::intrusive_ptr<c10::StorageImpl> adopt_storage(void* context, void* address, size_t nbytes);

// Throws the exception that waits in this thread's pending slot.
[[noreturn]] void throw_pending();
inline void check(int32_t status) {
  if (status != TT_OK) throw_pending();
}

// Runs `op` (an id of declare()) on a boxed stack, through Rust.
void dispatch(uint32_t op, const c10::OperatorHandle& handle, torch::jit::Stack* stack);
uint32_t declare(const c10::OperatorHandle& handle);
const c10::OperatorHandle& handle_of(uint32_t op);
std::vector<c10::IValue>& host_values();
// Lets the gradient of a host tensor that an op was fed with arrive from this device.
void accept_device_gradient(const at::Tensor& host);

}  // namespace tandem
