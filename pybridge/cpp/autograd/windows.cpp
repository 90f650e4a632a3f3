#include "autograd/windows.h"

#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

#include "device/threads.h"

namespace tandem {

namespace {

using torch::autograd::CopySlices;
using torch::autograd::variable_list;
using torch::autograd::generated::SelectBackward0;
using torch::autograd::generated::SliceBackward0;

std::optional<int64_t> size_of(const std::vector<c10::SymInt>& sizes, int64_t dim) { return sizes[dim].maybe_as_int(); }

std::optional<Window> selected(const SelectBackward0& node) {
  const auto dim = at::maybe_wrap_dim(node.dim, static_cast<int64_t>(node.self_sym_sizes.size()));
  const auto size = size_of(node.self_sym_sizes, dim);
  const auto index = node.index.maybe_as_int();
  if (!size || !index) return std::nullopt;
  return Window{dim, *index < 0 ? *index + *size : *index, 1, 1, false};
}

// Bounds are brought into the dimension as `slice` does it.
std::optional<Window> sliced(const SliceBackward0& node) {
  const auto dim = at::maybe_wrap_dim(node.dim, static_cast<int64_t>(node.self_sym_sizes.size()));
  const auto size = size_of(node.self_sym_sizes, dim);
  const auto start = node.start ? node.start->maybe_as_int() : 0;
  const auto end = node.end ? node.end->maybe_as_int() : std::numeric_limits<int64_t>::max();
  const auto step = node.step.maybe_as_int();
  if (!size || !start || !end || !step) return std::nullopt;
  const auto within = [&](int64_t at, int64_t least) { return std::clamp(at < 0 ? at + *size : at, least, *size); };
  const auto first = within(*start, 0);
  const auto length = within(*end, first) - first;
  return Window{dim, first, *step, length > 0 ? (length - 1) / *step + 1 : 0, true};
}

}  // namespace

std::optional<Window> Window::of(const torch::autograd::Node& node) {
  const auto& type = typeid(node);
  if (type == typeid(SelectBackward0)) return selected(static_cast<const SelectBackward0&>(node));
  if (type == typeid(SliceBackward0)) return sliced(static_cast<const SliceBackward0&>(node));
  return std::nullopt;
}

at::Tensor Window::in(const at::Tensor& whole) const {
  return keeps_dim ? whole.slice(dim, first, count > 0 ? last() + 1 : first, step) : whole.select(dim, first);
}

bool Window::equals(const Window& other) const {
  return dim == other.dim && first == other.first && count == other.count && (step == other.step || count == 1);
}

bool Window::is_apart_from(const Window& other) const {
  return dim == other.dim && (count == 0 || other.count == 0 || last() < other.first || other.last() < first);
}

// A copy to a view leaves zeros in the gradient.
NegativeZeros NegativeZeros::after(const torch::autograd::Node& node, const NegativeZeros& before) {
  if (typeid(node) != typeid(CopySlices)) return {};
  const auto* copy = static_cast<const CopySlices&>(node).fn.get();
  return copy && typeid(*copy) == typeid(torch::autograd::CopyBackwards) ? before : NegativeZeros();
}

// A sum is -0.0 only where both summands are.
void NegativeZeros::added(const NegativeZeros& other) {
  if (place_ != Place::Nowhere && other.place_ != Place::Anywhere) *this = other;
}

bool NegativeZeros::add_in(const at::Tensor& sum, const Window& window, const at::Tensor& part) {
  // The addition of zeros would flush denormal numbers, too.
  if (place_ == Place::Anywhere || flushes_denormals()) return false;
  if (place_ == Place::InWindow && !window.equals(window_)) {
    if (!window.is_apart_from(window_)) return false;
    // The program sees the version of the sum, if it becomes the gradient of a leaf.
    window_.in(sum.variable_data()).add_(0.0);
    place_ = Place::Nowhere;
  }
  window.in(sum).add_(part);
  return true;
}

// PyTorch keeps the operator's own node from changing while it runs by a mutex that only classes of nodes see.
struct WithMutex : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) { return node.*(&WithMutex::mutex_); }
};

// The steps of `CopySlices::apply`, without its copy of the gradient.
std::optional<variable_list> run_in_place(torch::autograd::Node& node, at::Tensor& grad) {
  if (typeid(node) != typeid(CopySlices)) return std::nullopt;
  auto& slices = static_cast<CopySlices&>(node);
  const std::lock_guard<std::mutex> lock(WithMutex::of(node));
  if (!slices.fn || grad.sizes() != slices.base.sizes() || grad.strides() != slices.base.strides() ||
      grad.storage_offset() != 0)
    return std::nullopt;
  const auto& view = slices.view;
  const auto part = slices.view_fn ? (*slices.view_fn)(grad)
                                   : grad.as_strided(view.sizes(), view.strides(),
                                                     view.storage_offset() - slices.base.storage_offset());
  slices.update_exec_info();
  auto results = (*slices.fn)({part.clone(at::MemoryFormat::Contiguous)});
  variable_list grads(node.num_outputs());
  for (size_t i = 0; i < results.size(); i++) {
    if (!results[i].defined() || !node.task_should_compute_output(i)) continue;
    if (i == 0) part.copy_(results[i]);
    grads[i] = i == 0 ? std::move(grad) : std::move(results[i]);
  }
  return grads;
}

}  // namespace tandem
