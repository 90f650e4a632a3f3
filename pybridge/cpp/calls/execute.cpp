#include "calls/execute.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "calls/encode.h"
#include "calls/operators.h"
#include "device/generator.h"
#include "device/host_memory.h"
#include "device/threads.h"

namespace tandem {

namespace {

// Inputs and results of this thread's latest call. The records for Rust point into it.
struct Results {
  std::vector<c10::IValue> values;
  std::vector<at::Tensor> inputs;  // flat inputs; undefined if absent
  std::vector<uint32_t> first;     // the number of each argument's first flat input
  std::vector<TtOut> outs, resized;
};
Results& results() {
  static thread_local Results r;
  return r;
}

at::Tensor inline_scalar(const TtTensor& t) {
  auto r = at::detail::empty_cpu({}, static_cast<c10::ScalarType>(t.dtype));
  std::memcpy(r.mutable_data_ptr(), t.storage, r.itemsize());
  return r;
}

at::Tensor host_window(const TtTensor& t) {
  auto impl = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(static_cast<c10::StorageImpl*>(t.storage));
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(impl)),
                                                    c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(t.dtype)));
  r.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(t.sizes, t.ndim), c10::IntArrayRef(t.strides, t.ndim),
                                                 t.offset);
  return r;
}

// Whether `r` has the window that `t` describes.
bool shows(const at::Tensor& r, const TtTensor& t) {
  return r.defined() && r.storage().unsafeGetStorageImpl() == t.storage && r.storage_offset() == t.offset &&
         static_cast<uint8_t>(r.scalar_type()) == t.dtype && r.sizes() == c10::IntArrayRef(t.sizes, t.ndim) &&
         r.strides() == c10::IntArrayRef(t.strides, t.ndim) && r.is_conj() == ((t.flags & TT_CONJ) != 0) &&
         r.is_neg() == ((t.flags & TT_NEG) != 0);
}

at::Tensor decode_tensor(const TtTensor& t, std::vector<at::Tensor>& inputs) {
  if (t.place == TT_ABSENT) return inputs.emplace_back();
  if (t.place == TT_HOST && t.flags & TT_SAME)
    for (size_t i = std::min(inputs.size(), kCompared); i-- > 0;)
      if (shows(inputs[i], t)) return inputs.emplace_back(inputs[i]);
  auto r = t.place == TT_INLINE ? inline_scalar(t) : host_window(t);
  if (t.flags & TT_CONJ) r._set_conj(true);
  if (t.flags & TT_NEG) r._set_neg(true);
  if (t.flags & TT_WRAPPED) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return inputs.emplace_back(std::move(r));
}

c10::IValue decode(const TtArg& a, const c10::TypePtr& type, std::vector<at::Tensor>& inputs) {
  switch (a.tag) {
    case TT_TENSOR: return decode_tensor(*static_cast<const TtTensor*>(a.ptr), inputs);
    case TT_TENSORS: {
      const auto* ts = static_cast<const TtTensor*>(a.ptr);
      auto list = type->cast<c10::ListType>();
      if (!list) list = type->expectRef<c10::OptionalType>().getElementType()->cast<c10::ListType>();
      if (list->getElementType()->kind() == c10::TypeKind::OptionalType) {
        c10::List<std::optional<at::Tensor>> r;
        r.reserve(a.len);
        for (uint32_t i = 0; i < a.len; i++) {
          auto t = decode_tensor(ts[i], inputs);
          r.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
        }
        return r;
      }
      c10::List<at::Tensor> r;
      r.reserve(a.len);
      for (uint32_t i = 0; i < a.len; i++) r.push_back(decode_tensor(ts[i], inputs));
      return r;
    }
    case TT_INT: return a.i;
    case TT_UNSIGNED: return at::Scalar(static_cast<uint64_t>(a.i));
    case TT_FLOAT: return a.f;
    case TT_BOOL: return a.i != 0;
    case TT_COMPLEX: return c10::complex<double>(a.c[0], a.c[1]);
    case TT_STR: return std::string(static_cast<const char*>(a.ptr), a.len);
    case TT_INTS: return c10::IntArrayRef(static_cast<const int64_t*>(a.ptr), a.len);
    case TT_FLOATS: return c10::ArrayRef<double>(static_cast<const double*>(a.ptr), a.len);
    case TT_BOOLS: {
      c10::List<bool> r;
      for (uint32_t i = 0; i < a.len; i++) r.push_back(static_cast<const uint8_t*>(a.ptr)[i] != 0);
      return r;
    }
    case TT_SCALARS: {
      c10::impl::GenericList r(c10::NumberType::get());
      for (uint32_t i = 0; i < a.len; i++) r.push_back(decode(static_cast<const TtArg*>(a.ptr)[i], type, inputs));
      return r;
    }
    case TT_DEVICE: return c10::Device(a.i == 2 ? c10::DeviceType::Meta : c10::DeviceType::CPU);
    case TT_GENERATOR: {
      auto* impl = static_cast<c10::GeneratorImpl*>(const_cast<void*>(a.ptr));
      return host_generator(at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(impl)));
    }
    default: return c10::IValue();
  }
}

void describe(const at::Tensor& t, TtOut& out) {
  out.sizes = t.sizes().data();
  out.strides = t.strides().data();
  out.offset = t.storage_offset();
  out.ndim = static_cast<uint32_t>(t.dim());
  out.dtype = static_cast<uint8_t>(t.scalar_type());
  out.flags = (t.is_conj() ? TT_CONJ : 0) | (t.is_neg() ? TT_NEG : 0);
  out.nbytes = t.storage().nbytes();
}

// Returns the number of the flat input that return `i` is according to the schema, or -1. The schema decides, because
// object identity is ambiguous: the `out=` tensor may also be an operand in some calls and not in others.
int64_t written_input(const c10::FunctionSchema& schema, size_t i, const Results& r) {
  const auto* alias = schema.returns()[i].alias_info();
  if (!alias || !alias->isWrite()) return -1;
  const auto& arguments = schema.arguments();
  for (size_t k = 0; k < arguments.size(); k++) {
    const auto* own = arguments[k].alias_info();
    if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return r.first[k];
  }
  return -1;
}

TtOut describe_output(const at::Tensor& t, const Results& r, int64_t written = -1) {
  TtOut out{};
  if (!t.defined()) return out;
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::Layout::Strided && !t.is_quantized(),
                              "tandem supports dense tensors only, and this operator makes one with layout ",
                              t.layout(), " and dtype ", t.scalar_type(), "; run it on the CPU: tensor.cpu()");
  describe(t, out);
  out.kind = TT_OUT_NEW;
  out.storage = t.storage().unsafeGetStorageImpl();
  if (written >= 0 && r.inputs[written].is_same(t)) {
    out.kind = TT_OUT_SAME, out.input = static_cast<uint32_t>(written);
    return out;
  }
  for (uint32_t i = 0; i < r.inputs.size(); i++) {
    if (!r.inputs[i].defined()) continue;
    if (r.inputs[i].is_same(t)) {
      out.kind = TT_OUT_SAME, out.input = i;
      return out;
    }
    if (out.kind == TT_OUT_NEW && r.inputs[i].storage().unsafeGetStorageImpl() == out.storage)
      out.kind = TT_OUT_ALIAS, out.input = i;
  }
  return out;
}

void describe_results(Results& r, const c10::FunctionSchema& schema) {
  auto& host = host_values();
  host.clear();
  for (size_t i = 0; i < r.values.size(); i++) {
    auto& v = r.values[i];
    if (v.isTensor()) {
      r.outs.push_back(describe_output(v.toTensor(), r, written_input(schema, i, r)));
    } else if (v.isTensorList()) {
      TtOut header{};
      header.kind = TT_OUT_LIST;
      header.input = static_cast<uint32_t>(v.toListRef().size());
      r.outs.push_back(header);
      for (const auto& e : v.toListRef()) r.outs.push_back(describe_output(e.toTensor(), r));
    } else {
      TtOut out{};
      out.kind = TT_OUT_HOST;
      out.input = static_cast<uint32_t>(host.size());
      host.push_back(v);
      r.outs.push_back(out);
    }
  }
}

void describe_resized(const TtTensor& before, uint32_t i, Results& r) {
  const auto& t = r.inputs[i];
  if (!t.defined()) return;
  if (t.sizes() == c10::IntArrayRef(before.sizes, before.ndim) &&
      t.strides() == c10::IntArrayRef(before.strides, before.ndim) && t.storage_offset() == before.offset)
    return;
  TtOut out{};
  describe(t, out);
  out.kind = TT_OUT_SAME, out.input = i;
  r.resized.push_back(out);
}

// Sets the dispatch keys for kernels as PyTorch sets them below autograd: no autograd, no autocast, no Python modes.
// Version counters are bumped only if `counted`.
c10::impl::ForceDispatchKeyGuard below_autograd(bool counted) {
  static const auto versions = c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  static const auto excluded = c10::default_excluded_set | c10::autograd_dispatch_keyset;
  return c10::impl::ForceDispatchKeyGuard(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
                                          counted ? excluded - versions : excluded | versions);
}

// Returns the number of the argument that is a written list of tensors, or -1.
int64_t written_list(const c10::FunctionSchema& schema, const TtArg* args, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const auto* alias = args[i].tag == TT_TENSORS ? schema.arguments()[i].alias_info() : nullptr;
    if (alias && alias->isWrite()) return static_cast<int64_t>(i);
  }
  return -1;
}

// Describes the written inputs that the kernel resized.
void describe_all_resized(const c10::FunctionSchema& schema, const TtArg* args, size_t n, Results& r) {
  for (size_t i = 0; i < n; i++) {
    if (args[i].tag != TT_TENSOR && args[i].tag != TT_TENSORS) continue;
    const auto* ts = static_cast<const TtTensor*>(args[i].ptr);
    const uint32_t len = args[i].tag == TT_TENSOR ? 1 : args[i].len;
    const auto* alias = schema.arguments()[i].alias_info();
    for (uint32_t k = 0; alias && alias->isWrite() && k < len; k++) describe_resized(ts[k], r.first[i] + k, r);
  }
}

void call(uint32_t op, const TtArg* args, size_t n, bool grad_mode, TtOuts* outs) {
  const PoolGuard pool;
  auto& r = results();
  r.values.clear(), r.inputs.clear(), r.first.clear(), r.outs.clear(), r.resized.clear();
  const auto& handle = handle_of(op);
  const auto& schema = handle.schema();
  for (size_t i = 0; i < n; i++) {
    r.first.push_back(static_cast<uint32_t>(r.inputs.size()));
    r.values.push_back(decode(args[i], schema.arguments()[i].type(), r.inputs));
  }
  const auto list = written_list(schema, args, n);
  try {
    const auto guard = below_autograd(/*counted=*/list >= 0);
    // Some kernels ask for the mode: oneDNN's recurrent layer saves values for the backward pass.
    const c10::AutoGradMode grad(grad_mode);
    handle.callBoxed(r.values);
  } catch (...) {
    auto& written = written_before_failure();
    written = 0;
    for (uint32_t k = 0; list >= 0 && k < args[list].len; k++) {
      const auto& t = r.inputs[r.first[list] + k];
      written += t.defined() && !t.is_inference() && t._version() > 0;
    }
    describe_all_resized(schema, args, n, r);
    *outs = {nullptr, 0, r.resized.data(), r.resized.size()};
    throw;
  }
  describe_results(r, schema);
  describe_all_resized(schema, args, n, r);
  *outs = {r.outs.data(), r.outs.size(), r.resized.data(), r.resized.size()};
}

}  // namespace

std::vector<c10::IValue>& host_values() {
  static thread_local std::vector<c10::IValue> values;
  return values;
}

uint32_t& written_before_failure() {
  static thread_local uint32_t n = 0;
  return n;
}

}  // namespace tandem

using namespace tandem;

extern "C" {

int32_t ttc_call(uint32_t op, const TtArg* args, size_t n, int32_t grad_mode, int32_t one_thread, TtOuts* outs) {
  return or_kept(int32_t{TT_RAISE}, [&] {
    const OneThread guard(one_thread != 0);
    call(op, args, n, grad_mode != 0, outs);
    return int32_t{TT_OK};
  });
}

void ttc_clear() {
  auto& r = results();
  r.values.clear(), r.inputs.clear();
}
}
