// Exceptions that pass through Rust. They are kept as handles, and rethrown with the type that PyTorch threw.
#pragma once

#include <exception>

#include "boundary/shim.h"

namespace tandem {

// Stores an exception for ttc_take_exception on this thread.
void keep_exception(std::exception_ptr e);

// Throws the exception in this thread's pending slot.
[[noreturn]] void throw_pending();
inline void check(int32_t status) {
  if (status != TT_OK) throw_pending();
}

// Returns the result of `make`. If `make` throws, keeps the exception and returns `failed`.
template <class Make, class T>
T or_kept(T failed, Make make) noexcept {
  try {
    return make();
  } catch (...) {
    keep_exception(std::current_exception());
    return failed;
  }
}

}  // namespace tandem
