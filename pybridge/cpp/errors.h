// Exceptions that cross Rust: kept as handles, raised again with eager's type.
#pragma once

#include <exception>

namespace tandem {

void keep_exception(std::exception_ptr e);

// What `make` gives; `failed` where it throws, and the exception is kept.
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
