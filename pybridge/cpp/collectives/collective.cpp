#include "collectives/collective.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <functional>
#include <sstream>
#include <string_view>
#include <utility>

#include "boundary/shim.h"
#include "collectives/self_messages.h"
#include "collectives/uneven.h"
#include "device/device_type.h"

namespace tandem {

namespace {

using at::Tensor;

// Time for telling the other ranks that this rank cannot make a call, before the error is raised.
constexpr auto kTelling = std::chrono::seconds(2);
// Maximum number of ops before a collective that ranks compare.
constexpr size_t kMostBefore = 1024;

std::string user_line() {
  std::array<char, 512> text{};
  return std::string(text.data(), tt_user_line(text.data(), text.size()));
}

// Replaces the tensors of an argument, including tensors in lists and in lists of lists.
template <class Each>
c10::IValue map_tensors(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) list.push_back(each(t));
    return list;
  }
  if (!value.isList() || value.toList().elementType()->kind() != c10::TypeKind::ListType) return value;
  c10::impl::GenericList lists(value.toList().elementType());
  for (const c10::IValue& list : value.toListRef()) lists.push_back(map_tensors(list, each));
  return lists;
}

// c10d::allreduce_ -> allreduce
std::string short_name(const c10::OperatorHandle& op) {
  auto name = op.operator_name().name.substr(std::string_view("c10d::").size());
  if (name.front() == '_') name.erase(0, 1);
  if (name.back() == '_') name.pop_back();
  return name;
}

bool begins_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

void check_operand(const Tensor& t, const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::Layout::Strided,
                              "torch.distributed on Tandem sends dense tensors, but ", name,
                              " was called with a tensor with layout ", t.layout(), "; call .to_dense() first");
  TORCH_CHECK(t.device().type() == kTandem, name, " was called with tensors on different devices: one is on ",
              t.device(), ", another on a tandem device");
}

// A contiguous tensor on the host with the sizes of `like`. Complex numbers are sent as pairs of floats, because Gloo
// has no complex numbers.
Tensor host_tensor(const Tensor& like) { return at::empty(like.sizes(), like.options().device(at::kCPU)); }

Tensor as_sent(const Tensor& t, bool by_rows) {
  const Tensor real = t.is_complex() ? at::view_as_real(t) : t;
  // NCCL compares only numbers of elements, so tensors are flattened: Gloo would also compare sizes.
  return by_rows ? real : real.view({-1});
}

const char* name_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "average";
    case c10d::ReduceOp::PRODUCT: return "product";
    case c10d::ReduceOp::MIN: return "minimum";
    case c10d::ReduceOp::MAX: return "maximum";
    default: return "other reduction";
  }
}

// The group for c10d's kernels on the host: the backend for tandem tensors is also its backend for host tensors.
c10::intrusive_ptr<c10d::ProcessGroup> host_group(c10d::ProcessGroup& group,
                                                  const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto host = c10::make_intrusive<c10d::ProcessGroup>(group.getStore(), group.getRank(), group.getSize());
  host->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return host;
}

}  // namespace

Collective::Collective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) : op_(op) {
  const auto& schema = op.schema().arguments();
  const auto& name = name_ = short_name(op);
  is_point_to_point_ = name == "send" || begins_with(name, "recv");
  by_rows_ = name == "alltoall_base";
  // Ranks may send different numbers of elements to each other.
  const bool is_even = !is_point_to_point_ && !begins_with(name, "alltoall");
  // Such lists have an entry for each rank, and must be the same on all ranks.
  const bool is_list = name == "allgather" || name == "reduce_scatter";
  const bool scatters = begins_with(name, "scatter") || begins_with(name, "reduce_scatter");
  std::ostringstream described, compared;
  described << name;
  compared << name;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = schema[i].name();
    const auto& value = arguments[i];
    if (argument == "process_group") {
      group_ = value.toCustomClass<c10d::ProcessGroup>();
      backend_ = group_->getBackend(kTandem);
      arguments_.emplace_back(host_group(*group_, backend_));
    } else if (argument == "reduce_op") {
      auto reduction = value.toCustomClass<c10d::ReduceOp>();
      const auto kind = reduction->op_;
      averages_ = kind == c10d::ReduceOp::AVG;
      if (averages_) reduction = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM);
      reduction_ = *reduction;
      arguments_.emplace_back(std::move(reduction));
      described << " (" << name_of(kind) << ")";
      compared << " " << name_of(kind);
    } else {
      if (argument == "root_rank") {
        compared << " root " << value.toInt();
        // Gloo computes with the tensors of all ranks, but only the root's tensor is a result.
        for (auto& operand : operands_) operand.is_received &= name != "reduce" || value.toInt() == group_->getRank();
      }
      if (argument == "dst" || argument == "src") peer_ = value.toInt();
      if (argument == "tag") tag_ = value.toInt();
      if (argument == "timeout" && value.toInt() > 0) timeout_ = std::chrono::milliseconds(value.toInt());
      const bool is_output = begins_with(argument, "output"), is_input = begins_with(argument, "input");
      const bool is_compared = is_even && (scatters != is_list ? !is_input : !is_output);
      map_tensors(value, [&](const Tensor& t) {
        check_operand(t, name);
        if (name == "barrier") return t;
        Operand operand{t, !is_output && !begins_with(name, "recv"), !is_input && name != "send", {}};
        if (operand.is_sent) bytes_ += static_cast<int64_t>(t.nbytes());
        if (operands_.size() < 4)
          described << (operands_.empty() ? " of " : ", ") << t.scalar_type() << ' ' << t.sizes();
        if (operands_.size() == 4) described << ", ...";
        if (is_compared) compared << ' ' << t.scalar_type() << ' ' << t.numel();
        operands_.push_back(std::move(operand));
        return t;
      });
      arguments_.push_back(value);
    }
  }
  before_.resize(kMostBefore);
  before_.resize(tt_take_recent(before_.data(), before_.size()));
  const auto line = user_line();
  description_ = described.str() + " at " + line;
  place_ = name + " at " + line;
  fingerprint_ = static_cast<int64_t>(std::hash<std::string>()(compared.str()));
}

void Collective::stage(at::TensorList sent) {
  started_ = std::chrono::steady_clock::now();
  size_t next = 0;
  for (auto& operand : operands_) {
    operand.on_host = host_tensor(operand.tensor);
    if (operand.is_sent) operand.on_host.copy_(sent[next++]);
    operand.tensor.reset();
  }
  next = 0;
  for (auto& argument : arguments_) {
    argument = map_tensors(argument, [&](const Tensor& t) {
      if (!operands_.empty()) return as_sent(operands_[next++].on_host, by_rows_);
      return at::empty({1}, t.options().device(at::kCPU));
    });
  }
}

std::vector<Tensor> Collective::on_host(bool Operand::* is_wanted) const {
  std::vector<Tensor> tensors;
  for (const auto& operand : operands_)
    if (operand.*is_wanted) tensors.push_back(as_sent(operand.on_host, by_rows_));
  return tensors;
}

c10::intrusive_ptr<c10d::Work> Collective::call() const {
  if (peer_ == group_->getRank())
    return name_ == "send" ? send_to_self(backend_, tag_, as_sent(operands_[0].on_host, by_rows_))
                           : receive_from_self(backend_, tag_, as_sent(operands_[0].on_host, by_rows_));
  if (name_ == "allgather" || name_ == "reduce_scatter" || name_ == "alltoall") {
    const auto sent = on_host(&Operand::is_sent), received = on_host(&Operand::is_received);
    if (name_ == "alltoall") return alltoall(*backend_, received, sent, timeout_), nullptr;
    if (is_uneven(received)) return allgather_uneven(*backend_, received, sent[0], timeout_), nullptr;
    if (is_uneven(sent)) return reduce_scatter_uneven(*backend_, received[0], sent, reduction_, timeout_), nullptr;
  }
  torch::jit::Stack stack = arguments_;
  op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack.back().toCustomClass<c10d::Work>();
}

void Collective::complete() const {
  if (!averages_) return;
  for (const auto& operand : operands_) {
    if (!operand.is_received) continue;
    if (at::isIntegralType(operand.on_host.scalar_type(), /*includeBool=*/true))
      operand.on_host.floor_divide_(group_->getSize());
    else
      operand.on_host.div_(group_->getSize());
  }
}

bool Collective::receives() const {
  return std::any_of(operands_.begin(), operands_.end(), [](const Operand& o) { return o.is_received; });
}

void Collective::finish(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    arguments_.clear();
    finished_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
  count_collective(*this, std::chrono::steady_clock::now() - started_);
}

void Collective::refuse(std::exception_ptr error) {
  started_ = std::chrono::steady_clock::now();
  refusal_ = std::move(error);
  // The tensors are dropped here, as in `stage`, because the queue's thread must not free tensors that Python knows
  // while the process ends.
  for (auto& operand : operands_) operand.tensor.reset();
  arguments_.clear();
}

bool Collective::ends_within(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, limit, [&] { return finished_.load(std::memory_order_relaxed); });
}

void Collective::wait() {
  const auto begin = std::chrono::steady_clock::now();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_finished = [&] { return finished_.load(std::memory_order_relaxed); };
    if (refusal_ && !ended_.wait_for(lock, kTelling, is_finished)) std::rethrow_exception(refusal_);
    ended_.wait(lock, is_finished);
  }
  count_wait(*this, std::chrono::steady_clock::now() - begin);
  if (error_) std::rethrow_exception(error_);
}

}  // namespace tandem
