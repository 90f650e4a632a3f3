// Nodes of PyTorch's autograd.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tandem {

// Creates a node in the pointer type of PyTorch's edges: an intrusive_ptr from torch 2.13 on, and a shared_ptr in older
// versions.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<T>(std::forward<Args>(args)...);
  }
}

}  // namespace tandem
