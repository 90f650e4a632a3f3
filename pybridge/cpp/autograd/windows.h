// Gradients of windows, which are written into the gradient of the whole tensor instead of a copy.
//
// The gradient of `x[:, t]` is a tensor of zeros with one window. A loop over t would make such a tensor in each step
// and add it to the sum of the others, so its time would grow with the square of the number of steps. If the sum belongs
// to the pass alone, the window of the sum is added to instead.
//
// In the same way, `out[:, t] = y` takes its window out of the gradient of `out`, which PyTorch copies for this.
//
// The bits are those of adding the whole tensor. That addition leaves all other elements as they are, except that -0.0
// plus 0.0 is 0.0. So it is known of each sum where it may have elements that are -0.0.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

namespace tandem {

// Elements of a tensor: those with an index of `first`, `first + step`, ... in one dimension, `count` in all.
struct Window {
  int64_t dim;
  int64_t first;
  int64_t step;
  int64_t count;
  // Whether a tensor of these elements has the dimension.
  bool keeps_dim;

  // The window that a node's result is zero outside of; nothing if this is not known.
  static std::optional<Window> of(const torch::autograd::Node& node);

  // The last index, if there is one.
  int64_t last() const { return first + (count - 1) * step; }
  at::Tensor in(const at::Tensor& whole) const;
  // Whether the windows have the same elements.
  bool equals(const Window& other) const;
  // Whether the windows have no element in common. False if this is not known.
  bool is_apart_from(const Window& other) const;
};

// Where a gradient may have elements that are -0.0.
class NegativeZeros {
 public:
  // Anywhere.
  NegativeZeros() = default;
  // In a window.
  explicit NegativeZeros(const Window& window) : place_(Place::InWindow), window_(window) {}
  // In the first result of a node, given those in its gradient.
  static NegativeZeros after(const torch::autograd::Node& node, const NegativeZeros& before);

  bool are_anywhere() const { return place_ == Place::Anywhere; }
  // Notes that a gradient has been added.
  void added(const NegativeZeros& other);
  // Adds a gradient to `sum`, which has these negative zeros. The gradient is `part` in the window, and 0.0 outside of it.
  // The sum must belong to the caller. Returns false if the whole gradient is needed; then nothing has been done.
  bool add_in(const at::Tensor& sum, const Window& window, const at::Tensor& part);

 private:
  enum class Place { Anywhere, InWindow, Nowhere };
  Place place_ = Place::Anywhere;
  Window window_{};
};

// Runs the node of an in-place operator on a view of a tensor, whose gradient `grad` is. The gradient must belong to the
// caller, and becomes that of the tensor before the operator. Returns the gradients that the node computes, or nothing if
// the node has to run.
std::optional<torch::autograd::variable_list> run_in_place(torch::autograd::Node& node, at::Tensor& grad);

}  // namespace tandem
