// The arguments of a call as flat records.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "boundary/shim.h"

namespace tandem {

// Number of leading inputs of a call with which each input is compared, to set TT_SAME and TT_APART.
constexpr size_t kCompared = 16;

// Whether a host tensor is a 0-dimensional integer that converts to zero in some integer dtype. This is the case if its
// low byte is zero.
bool may_be_zero(const at::Tensor& t);

// Builds the argument records of a call. Pointers in the records are valid as long as both the encoder and the
// arguments.
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
  void add(const std::optional<c10::Scalar>& s);
  void add(const c10::List<std::optional<at::Tensor>>& list) { args_.push_back(encode_one(c10::IValue(list))); }
  void add(c10::SymIntArrayRef list);
  void add(at::OptionalSymIntArrayRef list);
  // The elements of these lists are not copied: the caller's lists outlive the call.
  void add(at::IntArrayRef list);
  void add(at::OptionalIntArrayRef list);
  void add(const std::optional<at::ArrayRef<double>>& list);
  void add(c10::string_view text);
  void add(const std::optional<c10::string_view>& text);
  template <size_t N>
  void add(const std::array<bool, N>& list) {
    TtArg& a = next(TT_BOOLS);
    a.len = N, a.ptr = list.data();
  }
  void add(const c10::SymInt& i) { add_int(i.guard_int(__FILE__, __LINE__)); }
  void add(int64_t i) { add_int(i); }
  void add(bool b);
  void add(double d);
  void add(std::optional<c10::ScalarType> type);
  void add(const std::optional<at::Generator>& generator) { args_.push_back(encode_one(c10::IValue(generator))); }
  void add(const std::optional<int64_t>& i);
  void add(const std::optional<c10::SymInt>& i);
  void add(const std::optional<bool>& b);
  void add(const std::optional<double>& d);

  const TtArg* args() const { return args_.data(); }
  size_t size() const { return args_.size(); }
  // The device that the call runs on: the device of the first tandem tensor or, without one, the device argument, or
  // else the current device.
  c10::DeviceIndex device() const;
  // Whether the call draws from a generator whose state the program can read and set without Tandem's knowledge.
  bool draws_unordered() const { return draws_unordered_; }
  // Whether an operand is a host tensor with at least one dimension. False for copies, because they move their
  // gradients.
  bool has_host() const { return has_host_; }
  // Whether a host tensor with at least one dimension requires grad.
  bool host_requires_grad() const { return host_requires_grad_; }
  const std::vector<const at::Tensor*>& inputs() const { return inputs_; }
  // The tensor of flat input `i`.
  const at::Tensor& input(size_t i) const { return *inputs_[i]; }

 private:
  TtArg encode_one(const c10::IValue& v);
  TtArg& next(TtTag tag);
  void add_int(int64_t i) { next(TT_INT).i = i; }
  // Adds an argument that the call may leave out.
  template <class T>
  void add_optional(const std::optional<T>& value) {
    if (value.has_value())
      add(*value);
    else
      next(TT_NONE);
  }
  void encode_tensor(const at::Tensor& t);
  void meet(const at::Tensor& t);

  // Device of the first tandem tensor, and device of a device argument; -1 if the call has none.
  c10::DeviceIndex device_ = -1, named_ = -1;
  bool may_cross_ = false;
  bool has_host_ = false, host_requires_grad_ = false;
  bool draws_unordered_ = false;
  std::vector<TtArg> args_;
  std::vector<TtTensor> tensors_;
  std::vector<const at::Tensor*> inputs_;
  std::vector<int64_t> ints_;
  std::vector<double> floats_;
  std::vector<uint8_t> bools_;
  std::vector<TtArg> scalars_;
};

// Lends an encoder from a thread-local pool, which has one for each depth of nested calls.
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

}  // namespace tandem
