#include "functions/host_effects.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "boundary/shim.h"
#include "functions/call_backward.h"

namespace tandem {

namespace {

bool is_host(const at::Tensor& t) { return t.defined() && t.is_cpu() && t.has_storage(); }

template <class Each>
void each_tensor(const c10::IValue& value, Each&& each) {
  if (value.isTensor()) {
    each(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef())
      if (item.isTensor()) each(item.toTensor());
  }
}

HostEffects* effects = nullptr;

std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& call) {
  if (!effects || !tt_is_program()) return nullptr;
  return effects->before(call);
}

void observed(const at::RecordFunction& call, at::ObserverContext* inputs) {
  if (effects && inputs) effects->after(call, static_cast<const HostEffects::Inputs&>(*inputs));
}

// Whether an operator has a kernel that handles host tensors itself, instead of only calling other operators.
bool has_host_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Whether an operator has no kernel of its own for any device: it calls other operators.
bool is_composite(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
}

// Composite operators that use no more of a tensor than its sizes, dtype and device.
bool reads_no_elements(const char* name) {
  static const std::unordered_set<std::string_view> names = {
      "aten::_has_compatible_shallow_copy_type",
      "aten::broadcast_tensors",
      "aten::can_cast",
      "aten::expand_as",
      "aten::is_complex",
      "aten::is_conj",
      "aten::is_floating_point",
      "aten::is_inference",
      "aten::is_neg",
      "aten::is_signed",
      "aten::numel",
      "aten::reshape_as",
      "aten::result_type",
      "aten::size",
      "aten::stride",
      "aten::sym_numel",
      "aten::sym_size",
      "aten::sym_stride",
      "aten::type_as",
      "aten::view_as",
  };
  return names.count(name) != 0;
}

// Whether a tensor can be a counter: the only number of its storage, a float.
bool may_count(const at::Tensor& t) {
  return is_host(t) && t.dim() == 0 && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble) &&
         t.storage().nbytes() == t.itemsize() && !t.requires_grad();
}

bool is_one(const at::Scalar& number) { return !number.isComplex() && !number.isBoolean() && number.toDouble() == 1; }

}  // namespace

HostEffects::HostEffects(at::TensorList counters) {
  for (const auto& t : counters)
    if (may_count(t)) counters_.insert(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  auto callback = at::RecordFunctionCallback(&observe, &observed);
  callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
  handle_ = at::addThreadLocalCallback(callback);
  effects = this;
}

HostEffects::~HostEffects() {
  effects = nullptr;
  at::removeCallback(handle_);
}

std::unique_ptr<HostEffects::Inputs> HostEffects::before(const at::RecordFunction& call) {
  auto seen = std::make_unique<Inputs>();
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op || name->name == "torch_tandem::counted") return seen;
  const auto& arguments = op->schema().arguments();
  const auto inputs = call.inputs();
  const auto incremented = incremented_by(*op, inputs);
  if (incremented) seen->counts = count(*incremented);
  if (seen->counts) return seen;
  const bool is_kernel = has_host_kernel(*op);
  seen->is_composite = is_composite(*op);
  seen->reads = reads_;
  for (size_t i = 0; i < std::min(inputs.size(), arguments.size()); i++) {
    const auto* alias = arguments[i].alias_info();
    each_tensor(inputs[i], [&](const at::Tensor& t) {
      // A wrapped number is a number of the program, which is compared or followed.
      if (!is_host(t) || t.unsafeGetTensorImpl()->is_wrapped_number()) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      seen->storages.push_back(storage);
      if (has_made(storage)) return;
      if (!seen->is_composite) last_reads_[storage] = ++reads_;
      if (alias && alias->isWrite()) {
        writes_others_ |= !incremented;
        refuse(
            call,
            " writes a host tensor. Keep the tensor on the device (for an optimizer: fused=True or capturable=True)");
      }
      seen->may_read |= is_kernel;
    });
  }
  return seen;
}

std::optional<c10::List<at::Tensor>> HostEffects::incremented_by(const c10::OperatorHandle& op,
                                                                 c10::ArrayRef<const c10::IValue> inputs) const {
  const auto& [name, overload] = op.operator_name();
  const bool is_of_one = name == "aten::add_" && overload == "Tensor";
  const bool is_of_several = name == "aten::_foreach_add_" && (overload == "Tensor" || overload == "Scalar");
  if (!is_of_one && !is_of_several) return std::nullopt;
  // The values of other tensors may have changed when the call is replayed.
  const auto is_constant = [&](const at::Tensor& t) {
    const auto* impl = t.unsafeGetTensorImpl();
    const bool is_made = impl->is_wrapped_number() || has_made(impl->unsafe_storage().unsafeGetStorageImpl());
    return is_host(t) && t.dim() == 0 && is_made;
  };
  const at::DisableRecordFunctionGuard unobserved;
  for (const auto& value : inputs.slice(1))
    if (value.isTensor() ? !is_constant(value.toTensor()) || !is_one(value.toTensor().item())
                         : !value.isScalar() || !is_one(value.toScalar()))
      return std::nullopt;
  auto tensors = is_of_one ? c10::List<at::Tensor>({inputs[0].toTensor()}) : inputs[0].toTensorList();
  for (const at::Tensor& t : tensors)
    if (!may_count(t)) return std::nullopt;
  return tensors;
}

bool HostEffects::count(const c10::List<at::Tensor>& tensors) {
  bool are_counters = true;
  for (const at::Tensor& t : tensors) {
    const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    are_counters &= is_counter(storage);
    if (!has_made(storage)) incremented_.push_back(t.unsafeGetTensorImpl());
  }
  return are_counters;
}

void HostEffects::after(const at::RecordFunction& call, const Inputs& inputs) {
  if (inputs.counts) return;
  const auto is_input = [&](const c10::StorageImpl* storage) {
    return std::find(inputs.storages.begin(), inputs.storages.end(), storage) != inputs.storages.end();
  };
  bool returns_tensors = false, computes = false;
  for (const auto& output : call.outputs())
    each_tensor(output, [&](const at::Tensor& t) {
      returns_tensors |= t.defined();
      if (!is_host(t)) return;
      const auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (is_input(storage)) return;
      computes = true;
      made_.emplace(storage, t.storage().getWeakStorageImpl());
    });
  if (inputs.is_composite && may_read_itself(call, inputs))
    refuse(call,
           " may read a host tensor, where a replay would not read it again. Pass what depends on it as an argument");
  reads_values |= !inputs.storages.empty() && !returns_tensors;
  if (inputs.may_read && (computes || !returns_tensors))
    refuse(call,
           " reads a host tensor on the host, where a replay would not read it again. Use it in operators on the "
           "device only, or pass what depends on it as an argument");
}

bool HostEffects::may_read_itself(const at::RecordFunction& call, const Inputs& inputs) const {
  if (reads_no_elements(call.name())) return false;
  std::unordered_set<const c10::StorageImpl*> returned;
  for (const auto& output : call.outputs())
    each_tensor(output, [&](const at::Tensor& t) {
      if (is_host(t)) returned.insert(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    });
  return std::any_of(inputs.storages.begin(), inputs.storages.end(), [&](const c10::StorageImpl* storage) {
    const auto read = last_reads_.find(storage);
    const bool is_read = read != last_reads_.end() && read->second > inputs.reads;
    return !has_made(storage) && !returned.count(storage) && !is_read;
  });
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  // Returns the numbers of counters. A recorded call that reads them in this way is not refused.
  m.def("counted(Tensor[] counters) -> float[]");
}

TORCH_LIBRARY_IMPL(torch_tandem, CompositeImplicitAutograd, m) {
  m.impl("counted", [](at::TensorList counters) {
    const at::DisableRecordFunctionGuard unobserved;
    std::vector<double> numbers;
    for (const auto& t : counters) numbers.push_back(t.item().toDouble());
    return numbers;
  });
}

}  // namespace tandem
