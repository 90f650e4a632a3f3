#include "functions/recorded.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/bit_cast.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "calls/encode.h"
#include "device/device_type.h"

namespace tandem {

namespace {

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The number of hooks of a tensor, and of the node that accumulates its gradient.
size_t hooks_of(const at::Tensor& t) {
  using namespace torch::autograd::impl;
  if (!get_autograd_meta(t)) return 0;
  const size_t own = hooks(t).size() + (post_acc_grad_hooks(t) ? 1 : 0);
  const auto node = t.is_leaf() ? try_get_grad_accumulator(t) : nullptr;
  return node ? own + node->pre_hooks().size() + node->post_hooks().size() : own;
}

GradientType grad_dtype_of(const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  return meta ? meta->grad_dtype_ : std::nullopt;
}

// The implementations of attention that are enabled. `scaled_dot_product_attention` chooses among them.
uint32_t enabled_attention() {
  const auto& context = at::globalContext();
  return context.userEnabledMathSDP() | context.userEnabledFlashSDP() << 1 | context.userEnabledMemEfficientSDP() << 2 |
         context.userEnabledCuDNNSDP() << 3 | context.userEnabledOverrideableSDP() << 4 |
         context.allowFP16BF16ReductionMathSDP() << 5;
}

}  // namespace

void* identity(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  auto* storage = storage_of(t);
  return t.device().type() == kTandem ? storage->mutable_data_ptr().get_context() : storage;
}

uint32_t version_of(const at::Tensor& t) {
  const auto& version = t.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

std::pair<int64_t, int64_t> extent(const at::Tensor& t) {
  if (t.numel() == 0) return {0, 0};
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  const auto size = static_cast<int64_t>(t.itemsize());
  return {t.storage_offset() * size, (last + 1) * size};
}

bool may_overlap(const at::Tensor& one, const at::Tensor& two) {
  const auto [first, end] = extent(one);
  const auto [other_first, other_end] = extent(two);
  if (first >= other_end || other_first >= end) return false;
  // Parts of one tensor, as `chunk` and `unbind` return them, are at different places of rows of `row` elements.
  if (one.strides() != two.strides() || one.itemsize() != two.itemsize()) return true;
  for (int64_t d = 1; d <= one.dim(); d++) {
    const auto row = one.stride(d - 1);
    const auto outer = one.strides().slice(0, d);
    if (row <= 0 || std::any_of(outer.begin(), outer.end(), [&](int64_t stride) { return stride % row != 0; }))
      continue;
    const auto place = [&](const at::Tensor& t) {
      int64_t last = t.storage_offset() % row;
      for (int64_t k = d; k < t.dim(); k++) last += (t.size(k) - 1) * t.stride(k);
      return std::pair(t.storage_offset() % row, last);
    };
    const auto [begin, last] = place(one);
    const auto [other_begin, other_last] = place(two);
    if (last < row && other_last < row && (last < other_begin || other_last < begin)) return false;
  }
  return true;
}

std::vector<at::Tensor> undefined_for_none(const c10::List<std::optional<at::Tensor>>& list) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(list.size());
  for (const std::optional<at::Tensor>& t : list) tensors.push_back(t ? *t : at::Tensor());
  return tensors;
}

Modes Modes::now() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const auto& context = at::globalContext();
  return {keys.included_,
          keys.excluded_,
          c10::GradMode::is_enabled(),
          c10::InferenceMode::is_enabled(),
          context.deterministicAlgorithms(),
          context.deterministicAlgorithmsWarnOnly(),
          context.deterministicFillUninitializedMemory(),
          at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(),
          context.userEnabledMkldnn(),
          at::autocast::is_autocast_cache_enabled(),
          enabled_attention(),
          at::autocast::get_autocast_dtype(kTandem),
          c10::get_default_dtype_as_scalartype(),
          at::get_num_threads()};
}

bool Modes::operator==(const Modes& other) const {
  return included == other.included && excluded == other.excluded && grad == other.grad &&
         inference == other.inference && deterministic == other.deterministic && warn_only == other.warn_only &&
         fills == other.fills && hooks == other.hooks && onednn == other.onednn &&
         autocast_cache == other.autocast_cache && attention == other.attention && autocast == other.autocast &&
         default_dtype == other.default_dtype && threads == other.threads;
}

void ModesOfProcess::set(const Modes& modes) {
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(modes.deterministic, modes.warn_only);
  context.setDeterministicFillUninitializedMemory(modes.fills);
  context.setUserEnabledMkldnn(modes.onednn);
  context.setSDPUseMath(modes.attention & 1);
  context.setSDPUseFlash(modes.attention & 2);
  context.setSDPUseMemEfficient(modes.attention & 4);
  context.setSDPUseCuDNN(modes.attention & 8);
  context.setSDPUseOverrideable(modes.attention & 16);
  context.setAllowFP16BF16ReductionMathSDP(modes.attention & 32);
  if (c10::get_default_dtype_as_scalartype() != modes.default_dtype)
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(modes.default_dtype));
  if (at::get_num_threads() != modes.threads) at::set_num_threads(modes.threads);
}

TensorMetadata::TensorMetadata(const at::Tensor& t)
    : sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()), device(t.device()), flags(0) {
  if (t.is_conj()) flags |= TT_CONJ;
  if (t.is_neg()) flags |= TT_NEG;
}

bool TensorMetadata::is_of(const at::Tensor& t) const {
  return dtype == t.scalar_type() && t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides) &&
         device == t.device() && t.is_conj() == ((flags & TT_CONJ) != 0) && t.is_neg() == ((flags & TT_NEG) != 0);
}

bool TensorMetadata::operator==(const TensorMetadata& other) const {
  return sizes == other.sizes && strides == other.strides && dtype == other.dtype && device == other.device &&
         flags == other.flags;
}

TtOut TensorMetadata::record(int64_t offset) const {
  TtOut out{};
  out.sizes = sizes.data(), out.strides = strides.data(), out.ndim = static_cast<uint32_t>(sizes.size());
  out.dtype = static_cast<uint8_t>(dtype), out.flags = flags, out.offset = offset;
  return out;
}

Gradient::Gradient(const at::Tensor& leaf) {
  const auto& grad = leaf.grad();
  // A sparse gradient has no storage; its call is refused.
  defined = grad.defined() && grad.has_storage();
  if (!defined) return;
  context = identity(grad);
  window.emplace(grad);
  offset = grad.storage_offset();
  version = version_of(grad);
  requires_grad = grad.requires_grad();
}

Watched::Watched(const at::Tensor& t)
    : tensor(t),
      storage(t.storage().getWeakStorageImpl()),
      context(identity(t)),
      window(t),
      offset(t.storage_offset()),
      requires_grad(t.requires_grad()),
      is_leaf(t.is_leaf()),
      hooks(hooks_of(t)),
      grad_dtype(grad_dtype_of(t)),
      version(t.unsafeGetTensorImpl()->version_counter()),
      first_version(version.enabled() ? version.current_version() : 0) {
  if (is_leaf) gradient = Gradient(t);
}

bool Watched::is_same(const at::Tensor& t) const {
  return identity(t) == context && t.storage_offset() == offset && window.is_of(t) &&
         t.requires_grad() == requires_grad && t.is_leaf() == is_leaf && hooks_of(t) == hooks &&
         grad_dtype_of(t) == grad_dtype;
}

Argument::Argument(const at::Tensor& t, at::TensorList all)
    : defined(t.defined()),
      context(nullptr),
      offset(0),
      requires_grad(false),
      is_leaf(false),
      hooks(0),
      first(0),
      distance(0) {
  if (!defined) return;
  window.emplace(t);
  context = identity(t), offset = t.storage_offset();
  requires_grad = t.requires_grad();
  is_leaf = t.is_leaf();
  is_inference = t.is_inference();
  hooks = hooks_of(t), grad_dtype = grad_dtype_of(t);
  if (is_leaf) gradient = Gradient(t);
  first = first_on(t, all);
  distance = t.storage_offset() - all[first].storage_offset();
}

size_t Argument::first_on(const at::Tensor& t, at::TensorList all) {
  size_t i = 0;
  while (identity(all[i]) != identity(t)) i++;
  return i;
}

size_t Argument::first_same(const at::Tensor& t, at::TensorList all, size_t first) {
  size_t i = first;
  while (!all[i].is_same(t)) i++;
  return i;
}

bool Argument::equals(const Argument& other, bool reads_gradients) const {
  return defined == other.defined && window == other.window && requires_grad == other.requires_grad &&
         is_leaf == other.is_leaf && is_inference == other.is_inference &&
         (!reads_gradients || gradient.defined == other.gradient.defined) && hooks == other.hooks &&
         grad_dtype == other.grad_dtype && has_fixed_offset == other.has_fixed_offset &&
         (!has_fixed_offset || offset == other.offset) && first == other.first && distance == other.distance &&
         same == other.same;
}

bool Argument::accepts(const at::Tensor& t, at::TensorList all, bool reads_gradients) const {
  // A backward pass that does not use the arguments of its call need not keep them.
  if (!t.defined() || !defined) return t.defined() == defined || (!t.defined() && !same);
  if (t.layout() != c10::kStrided || !window->is_of(t) || t.is_inference() != is_inference) return false;
  // A backward pass uses only the elements of the call's arguments.
  if (same && (t.requires_grad() != requires_grad || hooks_of(t) != hooks || grad_dtype_of(t) != grad_dtype ||
               t.is_leaf() != is_leaf || (is_leaf && reads_gradients && t.grad().defined() != gradient.defined)))
    return false;
  if (has_fixed_offset && t.storage_offset() != offset) return false;
  if (identity(all[first]) != identity(t) || t.storage_offset() - all[first].storage_offset() != distance) return false;
  // As in the recorded call, `first` is the first argument on this storage, and `same` the first that is this tensor.
  return (first == 0 || first_on(t, all) == first) && (!same || first_same(t, all, first) == *same);
}

bool Argument::is_unchanged(const at::Tensor& t) const {
  if (!defined) return true;
  return window->is_of(t) && identity(t) == context && t.storage_offset() == offset &&
         t.requires_grad() == requires_grad && t.is_leaf() == is_leaf && hooks_of(t) == hooks;
}

Fed::Fed(const at::Tensor& t)
    : storage(t.storage().getWeakStorageImpl()),
      window(t),
      offset(t.storage_offset()),
      is_zero(may_be_zero(t)),
      version(t.unsafeGetTensorImpl()->version_counter()),
      is_number(t.unsafeGetTensorImpl()->is_wrapped_number()) {
  // The deleter of other libraries' memory is a function of these libraries.
  static const auto foreign = c10::InefficientStdFunctionContext::makeDataPtr(
                                  nullptr, [](void*) {}, c10::Device(c10::DeviceType::CPU))
                                  .get_deleter();
  is_own = storage_of(t)->data_ptr().get_deleter() != foreign;
}

bool operator==(const TtScalar& one, const TtScalar& two) { return one.kind == two.kind && one.bits == two.bits; }

std::optional<TtScalar> record_of(const at::Scalar& value) {
  if (value.isBoolean()) return TtScalar{0, value.toBool()};
  if (value.isFloatingPoint()) return TtScalar{2, c10::bit_cast<int64_t>(value.toDouble())};
  if (value.isIntegral(false) && value.type() != c10::ScalarType::UInt64) return TtScalar{1, value.toLong()};
  return std::nullopt;
}

std::string difference(const Recorded& one, const Recorded& two) {
  if (!(one.modes == two.modes)) return "a setting of PyTorch (grad mode, autocast, default dtype, ...) differs";
  if (one.reads_gradients != two.reads_gradients) return "it uses gradients in some calls only";
  const bool reads_gradients = one.reads_gradients;
  const auto same_argument = [&](const Argument& a, const Argument& b) { return a.equals(b, reads_gradients); };
  if (!std::equal(one.arguments.begin(), one.arguments.end(), two.arguments.begin(), two.arguments.end(),
                  same_argument))
    return "the metadata of an argument differs";
  const auto same_given = [](const Given& a, const Given& b) {
    return a.kind == b.kind && a.index == b.index && (a.kind != Given::kCaptured || a.context == b.context);
  };
  if (!std::equal(one.given.begin(), one.given.end(), two.given.begin(), two.given.end(), same_given))
    return "it uses other tensors in each call; pass them as arguments, and return those that the next call uses";
  const auto same_fed = [](const Fed& a, const Fed& b) {
    return a.kind == b.kind && a.index == b.index && a.offset == b.offset;
  };
  if (!std::equal(one.fed.begin(), one.fed.end(), two.fed.begin(), two.fed.end(), same_fed))
    return "it uses other host tensors in each call; pass them as arguments";
  const auto same_watched = [&](const Watched& a, const Watched& b) {
    return a.tensor == b.tensor && (!reads_gradients || a.gradient.defined == b.gradient.defined);
  };
  if (!std::equal(one.watched.begin(), one.watched.end(), two.watched.begin(), two.watched.end(), same_watched))
    return "its tensors have gradients in some calls only";
  const auto same_read = [](const Read& a, const Read& b) { return a.from == b.from; };
  if (!std::equal(one.reads.begin(), one.reads.end(), two.reads.begin(), two.reads.end(), same_read))
    return "it reads an element of another tensor";
  if (one.results != two.results || one.bases != two.bases) return "it returns other tensors";
  if (one.targets != two.targets) return "its backward pass has other outputs";
  if (one.gradients != two.gradients) return "it leaves other gradients behind";
  return "";
}

}  // namespace tandem
