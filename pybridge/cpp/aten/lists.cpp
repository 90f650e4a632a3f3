// `cat` and `stack` of long lists. The length of a list is part of a node, and programs that collect tensors in a loop
// join a different number of tensors each time. Long lists are therefore joined in pieces of a fixed length, in a loop.
// Then only the length of the last piece can be new, and it has few possible values.
#include <ATen/Operators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "calls/unboxed.h"

namespace tandem {

namespace {

// Number of tensors in a piece.
constexpr size_t kPiece = 16;
// Maximum size of the result, in bytes. Joining in pieces copies all elements twice.
constexpr size_t kMost = 1 << 18;

// Whether a list is joined in pieces: the list is long, and its tensors are contiguous and agree in device, dtype and
// all sizes except the size of dimension `dim`. With `dim` -1, all sizes must agree.
bool goes_in_pieces(at::TensorList list, int64_t dim) {
  if (list.size() <= kPiece) return false;
  const auto& first = list[0];
  size_t bytes = 0;
  return std::all_of(list.begin(), list.end(), [&](const at::Tensor& t) {
    bytes += t.nbytes();
    if (t.device() != first.device() || t.scalar_type() != first.scalar_type() || t.dim() != first.dim() ||
        !t.is_contiguous() || t.suggest_memory_format() != c10::MemoryFormat::Contiguous || t.is_conj() || t.is_neg() ||
        t.numel() == 0 || bytes > kMost)
      return false;
    for (int64_t d = 0; d < t.dim(); d++)
      if (d != dim && t.size(d) != first.size(d)) return false;
    return true;
  });
}

// Joins a list along dimension `dim` of the result, which has sizes `sizes`. `join` joins one piece.
template <class Join>
at::Tensor in_pieces(at::TensorList list, int64_t dim, at::IntArrayRef sizes, const Join& join) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor joined = at::empty(sizes, list[0].options());
  int64_t from = 0;
  for (size_t i = 0; i < list.size(); i += kPiece) {
    const at::Tensor piece = join(list.slice(i, std::min(kPiece, list.size() - i)));
    joined.narrow(dim, from, piece.size(dim)).copy_(piece);
    from += piece.size(dim);
  }
  return joined;
}

at::Tensor stack(at::TensorList list, int64_t dim) {
  using Whole = Unboxed<at::_ops::stack, at::_ops::stack::schema>;
  const int64_t at = dim < 0 && !list.empty() ? dim + list[0].dim() + 1 : dim;
  if (!goes_in_pieces(list, -1) || at < 0 || at > list[0].dim()) return Whole::call(list, dim);
  auto sizes = list[0].sizes().vec();
  sizes.insert(sizes.begin() + at, static_cast<int64_t>(list.size()));
  return in_pieces(list, at, sizes, [&](at::TensorList piece) { return Whole::call(piece, at); });
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  using Whole = Unboxed<at::_ops::cat, at::_ops::cat::schema>;
  if (tensors.size() <= kPiece || !tensors.isUnboxed()) return Whole::call(tensors, dim);
  const at::TensorList list = tensors.toUnboxed();
  const int64_t at = dim < 0 ? dim + list[0].dim() : dim;
  if (at < 0 || at >= list[0].dim() || !goes_in_pieces(list, at)) return Whole::call(tensors, dim);
  auto sizes = list[0].sizes().vec();
  sizes[at] = 0;
  for (const auto& t : list) sizes[at] += t.size(at);
  return in_pieces(list, at, sizes, [&](at::TensorList piece) { return Whole::call(piece, at); });
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("stack", stack);
  m.impl("cat", cat);
}

}  // namespace tandem
