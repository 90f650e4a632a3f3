// An operator's call without boxes. A boxed tensor is one more reference, and of a tensor that only Python holds, PyTorch
// counts that in the Python object: it takes the GIL for it, and again when the box goes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

#include "values.h"

namespace tandem {

// Tensors of an argument, at most.
template <class T>
size_t tensors_of(const T&) {
  return 1;
}
inline size_t tensors_of(const at::ITensorListRef& list) { return list.size(); }
inline size_t tensors_of(at::TensorList list) { return list.size(); }

template <class R>
struct Give {
  static R from(Decoder& outs) { return outs.next_tensor(); }
};
template <class... T>
struct Give<std::tuple<T...>> {
  // Braces are evaluated in order.
  static std::tuple<T...> from(Decoder& outs) { return std::tuple<T...>{Give<T>::from(outs)...}; }
};

template <class Op, class Schema>
struct Unboxed;

template <class Op, class R, class... Args>
struct Unboxed<Op, R(Args...)> {
  static R call(Args... args) {
    static const uint32_t id =
        declare(c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name));
    Lease encoder;
    encoder->begin(sizeof...(Args), (tensors_of(args) + ...));
    (encoder->add(args), ...);
    const TtOuts outs = run(id, *encoder);
    if constexpr (std::is_reference_v<R>) {
      // In place, it gives what it was given first.
      return std::get<0>(std::tie(args...));
    } else {
      Decoder decoder(outs, *encoder);
      return Give<R>::from(decoder);
    }
  }
};

}  // namespace tandem
