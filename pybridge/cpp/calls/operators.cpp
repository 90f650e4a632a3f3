#include "calls/operators.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "boundary/shim.h"

namespace tandem {

namespace {

// Operator handles by op id. Entries are added when the library is loaded and, for operators outside of aten, at their
// first call. Every call looks up a handle. The look-up takes no lock, because each entry of `index` is written once.
struct Table {
  static constexpr size_t kMost = 1 << 15;
  std::mutex mutex;
  std::deque<c10::OperatorHandle> handles;
  std::unordered_map<c10::OperatorName, uint32_t> ids;
  std::array<std::atomic<const c10::OperatorHandle*>, kMost> index{};
};
Table& table() {
  static Table t;
  return t;
}

// The letter of an argument's class in TtOpDecl::args.
uint8_t argument_class(const c10::Argument& a) {
  auto type = a.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (auto list = type->cast<c10::ListType>()) {
    type = list->getElementType();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return 't';
    case c10::TypeKind::SymIntType: return 's';
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType: return 'v';
    case c10::TypeKind::DeviceObjType: return 'd';
    case c10::TypeKind::GeneratorType: return 'g';
    default: return 'a';
  }
}

bool is_tensor_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  auto list = type->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::TensorType;
}

}  // namespace

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

uint32_t declare(const c10::OperatorHandle& handle) {
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  const auto found = t.ids.find(handle.operator_name());
  if (found != t.ids.end()) return found->second;
  const auto& schema = handle.schema();
  std::vector<uint8_t> classes, written;
  for (const auto& a : schema.arguments()) {
    classes.push_back(argument_class(a));
    written.push_back(a.alias_info() && a.alias_info()->isWrite());
  }
  const auto name = full_name(handle.operator_name());
  TtOpDecl decl{};
  decl.name = name.data(), decl.name_len = name.size();
  decl.args = classes.data(), decl.written = written.data(), decl.n_args = classes.size();
  for (const auto& r : schema.returns()) decl.returns_host |= !is_tensor_type(r.type());
  decl.dynamic_shape = handle.hasTag(at::Tag::dynamic_output_shape);
  decl.random = handle.hasTag(at::Tag::nondeterministic_seeded);
  decl.pointwise = handle.hasTag(at::Tag::pointwise);
  decl.foreign = name.rfind("aten::", 0) != 0;
  const uint32_t id = tt_declare_op(&decl);
  TORCH_INTERNAL_ASSERT(id == t.handles.size());
  TORCH_CHECK(id < Table::kMost, "tandem knows more than ", Table::kMost, " operators already");
  t.handles.push_back(handle);
  t.index[id].store(&t.handles.back(), std::memory_order_release);
  t.ids.emplace(handle.operator_name(), id);
  return id;
}

const c10::OperatorHandle& handle_of(uint32_t op) { return *table().index[op].load(std::memory_order_acquire); }

}  // namespace tandem
