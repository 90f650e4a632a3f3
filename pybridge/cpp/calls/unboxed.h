// Capturing kernels with unboxed arguments. Boxing a tensor adds a reference. If only Python refers to the tensor,
// PyTorch counts that reference in the Python object, and takes the GIL for this once at boxing and once at unboxing.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "boundary/shim.h"
#include "calls/call.h"
#include "calls/decode.h"
#include "calls/encode.h"
#include "calls/operators.h"

namespace tandem {

// Maximum number of tensors in an argument.
template <class T>
size_t tensors_of(const T&) {
  return 1;
}
inline size_t tensors_of(const at::ITensorListRef& list) { return list.size(); }
inline size_t tensors_of(at::TensorList list) { return list.size(); }
inline size_t tensors_of(const c10::List<std::optional<at::Tensor>>& list) { return list.size(); }

// Converts outputs to the return type of an operator.
template <class R>
struct Give {
  static R from(Decoder& outs) { return outs.next_tensor(); }
};
template <class... T>
struct Give<std::tuple<T...>> {
  // A braced initializer list evaluates its elements in order.
  static std::tuple<T...> from(Decoder& outs) { return std::tuple<T...>{Give<T>::from(outs)...}; }
};

// The capturing kernel of an operator, a struct of at::_ops.
template <class Op, class Schema>
struct Unboxed;

template <class Op, class R, class... Args>
struct Unboxed<Op, R(Args...)> {
  static R call(Args... args) {
    static const uint32_t id = declare(c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name));
    Lease encoder;
    encoder->begin(sizeof...(Args), (tensors_of(args) + ...));
    (encoder->add(args), ...);
    const TtOuts outs = run(id, *encoder);
    if constexpr (std::is_reference_v<R>) {
      // An in-place operator returns its first argument.
      return std::get<0>(std::tie(args...));
    } else {
      Decoder decoder(outs, *encoder);
      return Give<R>::from(decoder);
    }
  }
};

}  // namespace tandem
