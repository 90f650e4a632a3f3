// References to the program's tensors that do not keep them alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace tandem {

// A weak reference to a tensor. PyTorch swaps no tensors that have weak references (torch.utils.swap_tensors), so all
// references can be cleared.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& t);

  // Returns the tensor, or null if the tensor no longer exists or the reference was cleared.
  c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> lock() const;
  bool expired() const;
  bool operator==(const WeakTensor& other) const;

  // Clears all references. They count as references to tensors that no longer exist.
  static void clear_all();

 private:
  struct Reference;
  std::shared_ptr<Reference> reference_;
};

}  // namespace tandem
