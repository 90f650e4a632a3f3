#include "calls/encode.h"

#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "device/device_type.h"
#include "device/generator.h"
#include "device/guard.h"
#include "device/storage.h"

namespace tandem {

namespace {

uint16_t flags_of(const at::Tensor& t) {
  uint16_t flags = 0;
  if (t.requires_grad()) flags |= TT_REQUIRES_GRAD;
  if (t.is_conj()) flags |= TT_CONJ;
  if (t.is_neg()) flags |= TT_NEG;
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) flags |= TT_WRAPPED;
  return flags;
}

// Whether two records describe the same window.
bool show_the_same(const TtTensor& a, const TtTensor& b) {
  constexpr uint16_t kShown = TT_CONJ | TT_NEG;
  return a.storage == b.storage && a.place == b.place && a.offset == b.offset && a.dtype == b.dtype &&
         (a.flags & kShown) == (b.flags & kShown) && a.ndim == b.ndim &&
         std::equal(a.sizes, a.sizes + a.ndim, b.sizes) && std::equal(a.strides, a.strides + a.ndim, b.strides);
}

// Maximum number of integers in all integer lists of an unboxed call.
constexpr size_t kMostInts = 256;

// Number of elements of each scratch array that the arguments need. The arrays are reserved with this size, so that
// pointers into them stay valid.
struct Need {
  size_t tensors = 0, ints = 0, floats = 0, bools = 0, scalars = 0;

  void count(const c10::IValue& v) {
    if (v.isTensor()) {
      tensors++;
    } else if (v.isList()) {
      for (const auto& e : v.toListRef()) {
        if (e.isTensor() || e.isNone()) tensors++;
        ints++, floats++, bools++, scalars++;
      }
    } else if (v.isNone()) {
      tensors++;
    }
  }
};

}  // namespace

bool may_be_zero(const at::Tensor& t) {
  return t.dim() == 0 && c10::isIntegralType(t.scalar_type(), /*includeBool=*/true) &&
         *static_cast<const char*>(t.const_data_ptr()) == 0;
}

void Encoder::encode(const c10::IValue* args, size_t n) {
  Need need;
  for (size_t i = 0; i < n; i++) need.count(args[i]);
  args_.clear(), tensors_.clear(), inputs_.clear(), ints_.clear(), floats_.clear(), bools_.clear();
  scalars_.clear();
  has_host_ = host_requires_grad_ = draws_unordered_ = false;
  device_ = -1, named_ = -1, may_cross_ = false;
  args_.reserve(n), tensors_.reserve(need.tensors), inputs_.reserve(need.tensors);
  ints_.reserve(need.ints), floats_.reserve(need.floats), bools_.reserve(need.bools);
  scalars_.reserve(need.scalars);
  for (size_t i = 0; i < n; i++) args_.push_back(encode_one(args[i]));
}

c10::DeviceIndex Encoder::device() const { return device_ >= 0 ? device_ : named_ >= 0 ? named_ : current_device(); }

// Handles the first tandem tensor of a call, and each later tandem tensor on another device.
void Encoder::meet(const at::Tensor& t) {
  TORCH_CHECK(device_ < 0 || may_cross_,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              "tandem:", static_cast<int>(device_), " and ", t.device(), "!");
  if (device_ < 0) device_ = t.device().index();
}

void Encoder::encode_tensor(const at::Tensor& t) {
  inputs_.push_back(&t);
  TtTensor& out = tensors_.emplace_back();
  out = TtTensor{};
  if (!t.defined()) return;
  const auto* impl = t.unsafeGetTensorImpl();
  const auto device = impl->device_type();
  if (device == kTandem) {
    out.place = TT_TANDEM;
    out.storage = storage_context(t);
    if (impl->device().index() != device_) meet(t);
  } else if (device == c10::DeviceType::CPU) {
    TORCH_CHECK_NOT_IMPLEMENTED(impl->layout() == c10::Layout::Strided && !c10::isQIntType(t.scalar_type()),
                                "tandem supports dense tensors only, but an operand has layout ", impl->layout(),
                                " and dtype ", t.scalar_type(), "; call .to_dense() or .dequantize() on it first");
    out.place = TT_HOST;
    out.storage = impl->unsafe_storage().unsafeGetStorageImpl();
    TORCH_CHECK(out.storage, "Cannot access data pointer of Tensor that doesn't have storage");
    // A copy-on-write storage is materialized now, while an exception can still be thrown.
    if (c10::impl::cow::is_cow_data_ptr(impl->unsafe_storage().data_ptr())) impl->unsafe_storage().mutable_data();
  } else {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", t.device(),
                " and tandem:", static_cast<int>(this->device()), "!");
  }
  out.sizes = impl->sizes().data();
  out.strides = impl->strides().data();
  out.offset = impl->storage_offset();
  out.ndim = static_cast<uint32_t>(impl->dim());
  out.dtype = static_cast<uint8_t>(t.scalar_type());
  out.flags = flags_of(t);
  if (C10_UNLIKELY(out.place == TT_HOST) && may_be_zero(t)) out.flags |= TT_ZERO;
  // Some kernels check whether two arguments are the same tensor (attention), and some refuse an output that is also an
  // operand.
  for (size_t i = std::min(tensors_.size() - 1, kCompared); i-- > 0;) {
    if (C10_LIKELY(!show_the_same(tensors_[i], out))) continue;
    out.flags |= inputs_[i]->unsafeGetTensorImpl() == impl ? TT_SAME : TT_APART;
    break;
  }
  // The gradient of a 0-dimensional tensor needs no help: autograd moves it to the right device.
  if (C10_UNLIKELY(out.place == TT_HOST && out.ndim > 0)) {
    has_host_ |= !may_cross_;
    host_requires_grad_ |= (out.flags & TT_REQUIRES_GRAD) != 0;
  }
}

TtArg Encoder::encode_one(const c10::IValue& v) {
  TtArg a{};
  if (v.isTensor()) {
    a.tag = TT_TENSOR;
    encode_tensor(v.toTensor());
    a.ptr = &tensors_.back();
  } else if (v.isNone()) {
    a.tag = TT_NONE;
  } else if (v.isInt()) {
    a.tag = TT_INT, a.i = v.toInt();
  } else if (v.isSymInt()) {
    a.tag = TT_INT, a.i = v.toSymInt().guard_int(__FILE__, __LINE__);
  } else if (v.isDouble()) {
    a.tag = TT_FLOAT, a.f = v.toDouble();
  } else if (v.isBool()) {
    a.tag = TT_BOOL, a.i = v.toBool();
  } else if (v.isComplexDouble()) {
    const auto c = v.toComplexDouble();
    a.tag = TT_COMPLEX, a.c[0] = c.real(), a.c[1] = c.imag();
  } else if (v.isString()) {
    const auto& s = v.toStringRef();
    a.tag = TT_STR, a.len = static_cast<uint32_t>(s.size()), a.ptr = s.data();
  } else if (v.isDevice()) {
    const auto d = v.toDevice().type();
    const bool ours = d == kTandem || d == c10::DeviceType::CUDA;
    if (ours) named_ = index_of(v.toDevice());
    a.tag = TT_DEVICE;
    a.i = ours ? 0 : d == c10::DeviceType::Meta ? 2 : 1;
  } else if (v.isGenerator()) {
    a.tag = TT_GENERATOR, a.ptr = v.toGenerator().unsafeGetGeneratorImpl();
    draws_unordered_ |= !is_ordered(v.toGenerator());
  } else if (v.isList()) {
    const auto list = v.toListRef();
    a.len = static_cast<uint32_t>(list.size());
    const bool tensors =
        v.isTensorList() || v.isOptionalTensorList() || (!list.empty() && (list[0].isTensor() || list[0].isNone()));
    if (tensors) {
      static const at::Tensor undefined;
      a.tag = TT_TENSORS;
      a.ptr = tensors_.data() + tensors_.size();
      for (const auto& e : list) encode_tensor(e.isTensor() ? e.toTensor() : undefined);
    } else if (v.isIntList() || v.isSymIntList()) {
      a.tag = TT_INTS;
      a.ptr = ints_.data() + ints_.size();
      for (const auto& e : list) ints_.push_back(e.isSymInt() ? e.toSymInt().guard_int(__FILE__, __LINE__) : e.toInt());
    } else if (v.isDoubleList()) {
      a.tag = TT_FLOATS;
      a.ptr = floats_.data() + floats_.size();
      for (const auto& e : list) floats_.push_back(e.toDouble());
    } else if (v.isBoolList()) {
      a.tag = TT_BOOLS;
      a.ptr = bools_.data() + bools_.size();
      for (const auto& e : list) bools_.push_back(e.toBool());
    } else {
      a.tag = TT_SCALARS;
      a.ptr = scalars_.data() + scalars_.size();
      for (const auto& e : list) scalars_.push_back(encode_one(e));
    }
  } else if (v.isUnsigned()) {
    const auto u = v.toUInt();
    a.tag = u <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ? TT_INT : TT_UNSIGNED;
    a.i = static_cast<int64_t>(u);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tandem does not support an argument of type ", v.tagKind(),
                                "; run this operator on the CPU: tensor.cpu()");
  }
  return a;
}

void Encoder::begin(size_t n, size_t tensors, bool may_cross) {
  args_.clear(), tensors_.clear(), inputs_.clear(), ints_.clear();
  has_host_ = host_requires_grad_ = draws_unordered_ = false;
  device_ = -1, named_ = -1, may_cross_ = may_cross;
  // The arrays are reserved, so that pointers into them stay valid.
  args_.reserve(n), tensors_.reserve(tensors), inputs_.reserve(tensors), ints_.reserve(kMostInts);
}

TtArg& Encoder::next(TtTag tag) {
  TtArg& a = args_.emplace_back();
  a.tag = tag;
  return a;
}

void Encoder::add(const at::Tensor& t) {
  encode_tensor(t);
  next(TT_TENSOR).ptr = &tensors_.back();
}

void Encoder::add(const std::optional<at::Tensor>& t) { add_optional(t); }
void Encoder::add(const std::optional<c10::Scalar>& s) { add_optional(s); }
void Encoder::add(const std::optional<int64_t>& i) { add_optional(i); }
void Encoder::add(const std::optional<c10::SymInt>& i) { add_optional(i); }
void Encoder::add(const std::optional<bool>& b) { add_optional(b); }
void Encoder::add(const std::optional<double>& d) { add_optional(d); }
void Encoder::add(const std::optional<c10::string_view>& text) { add_optional(text); }

void Encoder::add(const at::ITensorListRef& list) {
  const auto first = tensors_.size();
  for (const at::Tensor& t : list) encode_tensor(t);
  TtArg& a = next(TT_TENSORS);
  a.len = static_cast<uint32_t>(list.size());
  a.ptr = tensors_.data() + first;
}

void Encoder::add(const c10::Scalar& s) {
  switch (s.isSymbolic() ? c10::ScalarType::Undefined : s.type()) {
    case c10::ScalarType::Double: return add(s.toDouble());
    case c10::ScalarType::Long: return add_int(s.toLong());
    case c10::ScalarType::Bool: return add(s.toBool());
    default: args_.push_back(encode_one(c10::IValue(s)));
  }
}

void Encoder::add(c10::SymIntArrayRef list) {
  TORCH_INTERNAL_ASSERT(ints_.size() + list.size() <= kMostInts);
  TtArg& a = next(TT_INTS);
  a.len = static_cast<uint32_t>(list.size());
  a.ptr = ints_.data() + ints_.size();
  for (const auto& i : list) ints_.push_back(i.guard_int(__FILE__, __LINE__));
}

void Encoder::add(at::OptionalSymIntArrayRef list) {
  if (list.has_value())
    add(*list);
  else
    next(TT_NONE);
}

void Encoder::add(at::IntArrayRef list) {
  TtArg& a = next(TT_INTS);
  a.len = static_cast<uint32_t>(list.size());
  a.ptr = list.data();
}

void Encoder::add(at::OptionalIntArrayRef list) {
  if (list.has_value())
    add(*list);
  else
    next(TT_NONE);
}

void Encoder::add(const std::optional<at::ArrayRef<double>>& list) {
  if (!list.has_value()) {
    next(TT_NONE);
    return;
  }
  TtArg& a = next(TT_FLOATS);
  a.len = static_cast<uint32_t>(list->size());
  a.ptr = list->data();
}

void Encoder::add(c10::string_view text) {
  TtArg& a = next(TT_STR);
  a.len = static_cast<uint32_t>(text.size());
  a.ptr = text.data();
}

void Encoder::add(bool b) { next(TT_BOOL).i = b; }

void Encoder::add(double d) { next(TT_FLOAT).f = d; }

void Encoder::add(std::optional<c10::ScalarType> type) {
  if (type.has_value())
    add_int(static_cast<int64_t>(*type));
  else
    next(TT_NONE);
}

thread_local std::vector<std::unique_ptr<Encoder>> Lease::pool;
thread_local size_t Lease::depth = 0;

}  // namespace tandem
