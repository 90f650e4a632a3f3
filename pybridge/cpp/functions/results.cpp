// What a recorded call leaves: its results with their graph, and gradients.
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "functions/recorder.h"

namespace tandem {

// Whether the call has run a backward pass that freed the graph of a result.
bool Recorder::is_consumed(const at::Tensor& t) const {
  bool found = false;
  for (const auto& root : consumed_)
    each_node(root, [&](Node& node) {
      found |= &node == t.grad_fn().get();
      return !found;
    });
  return found;
}

// Finds the origin of a tensor, from which a replay gets it. Returns nothing for a tensor that the call neither made
// nor was given.
std::optional<Result> Recorder::place(const at::Tensor& t, const TtRecorded& in_rust) const {
  Result result;
  if (!t.defined()) return result;
  // Python code answers questions about a tensor of a class with `__torch_dispatch__`.
  if (t.unsafeGetTensorImpl()->is_python_dispatch() || !t.has_storage()) return std::nullopt;
  result.version = version_of(t), result.counter = counter_of(t.unsafeGetTensorImpl()->version_counter());
  result.is_inference = t.is_inference();
  for (size_t i = 0; i < arguments_.size(); i++) {
    if (!arguments_[i].is_same(t)) continue;
    result.kind = Result::kArgument, result.index = i;
    return result;
  }
  if (const auto seen = seen_.find(t.unsafeGetTensorImpl()); seen != seen_.end()) {
    result.kind = Result::kWatched, result.index = seen->second;
    return result;
  }
  if (!is_tandem(t)) return std::nullopt;
  result.window.emplace(t);
  result.offset = t.storage_offset();
  const auto* context = identity(t);
  for (size_t i = 0; i < in_rust.n_kept; i++) {
    if (!in_rust.kept[i].is_kept || in_rust.kept[i].storage != context) continue;
    result.kind = Result::kKept, result.index = i;
    return result;
  }
  for (size_t i = 0; i < call_.given.size(); i++) {
    if (call_.given[i].context != context) continue;
    result.kind = Result::kGiven, result.index = i, result.offset -= call_.given[i].base;
    return result;
  }
  return std::nullopt;
}

std::optional<Result> Recorder::place_beside(const at::Tensor& t) const {
  const auto on = [&](Result::Kind kind, size_t index, int64_t base) {
    Result result;
    result.kind = kind, result.index = index;
    result.version = version_of(t), result.counter = counter_of(t.unsafeGetTensorImpl()->version_counter());
    result.is_inference = t.is_inference();
    result.window.emplace(t);
    result.offset = t.storage_offset() - base;
    return result;
  };
  const auto* context = identity(t);
  for (size_t i = 0; i < arguments_.size(); i++)
    if (identity(arguments_[i]) == context) return on(Result::kOnArgument, i, arguments_[i].storage_offset());
  for (size_t i = 0; i < call_.watched.size(); i++)
    if (call_.watched[i].context == context) return on(Result::kOnWatched, i, call_.watched[i].offset);
  return std::nullopt;
}

void Recorder::find_results(at::TensorList results, const std::vector<bool>& consumed, bool attaches,
                            const TtRecorded& in_rust) {
  ska::flat_hash_map<const at::TensorImpl*, size_t> first;
  for (size_t i = 0; i < results.size(); i++) {
    const auto& t = results[i];
    if (t.defined() && !t.has_storage()) {
      refuse("it returns a sparse tensor. Return a dense one");
      call_.results.emplace_back();
      continue;
    }
    auto result = place(t, in_rust);
    if (!result && is_tandem(t) && is_made_view(t))
      refuse("a result that requires grad is a view of a tensor from outside of the call. Return a copy (clone())");
    if (!result && is_tandem(t)) result = place_beside(t);
    if (result && result->kind == Result::kOnArgument && !is_within_argument(t))
      refuse("it uses memory of an argument beyond the argument's elements. Pass the whole tensor");
    if (!result && is_tandem(t)) {
      // The call returns a tensor of the program that no operator has used.
      watch(t);
      call_.watched_writes.push_back(0);
      result = place(t, in_rust);
    }
    if (!result) {
      refuse("it returns a tensor on the host");
      result.emplace();
    }
    // A view of a leaf that was made without grad mode reports the leaf's requires_grad, but has no graph.
    const bool has_graph = t.defined() && t.requires_grad() && !(t.is_leaf() && t.is_view());
    if (has_graph && result->kind != Result::kArgument && result->kind != Result::kWatched) {
      result->requires_grad = true;
      result->is_consumed = consumed[i];
      if (t.is_view()) result->creation = torch::autograd::impl::get_view_autograd_meta(t)->get_creation_meta();
      if (!consumed[i] && result->kind != Result::kKept)
        refuse("a result that requires grad is a view of a tensor from outside of the call. Return a copy (clone())");
      else if (!consumed[i] && !attaches)
        refuse(
            "a result requires grad, and it has attributes or is of a subclass, or the call returns objects, changes "
            "its arguments, has effects that are skipped, or uses hooks for saved tensors");
    }
    if (t.defined()) {
      const auto [known, is_new] = first.emplace(t.unsafeGetTensorImpl(), i);
      if (!is_new) result->same = known->second;
    }
    call_.results.push_back(std::move(*result));
  }
}

void Recorder::find_bases(at::TensorList results, const TtRecorded& in_rust) {
  std::vector<at::Tensor> bases;
  const auto number_of = [&](const at::Tensor& base) {
    return static_cast<size_t>(
        std::find_if(bases.begin(), bases.end(), [&](const auto& t) { return t.is_same(base); }) - bases.begin());
  };
  // A view that existed before the call stands for a base that the call has not seen.
  const auto seen = [&](const at::Tensor& base) {
    const auto has_base = [&](const at::Tensor& t) {
      return t.defined() && (t.is_same(base) || (t.is_view() && t._base().is_same(base)));
    };
    const auto argument = std::find_if(arguments_.begin(), arguments_.end(), has_base);
    if (argument != arguments_.end()) return *argument;
    for (const auto& watched : call_.watched)
      if (at::Tensor t(watched.tensor.lock()); has_base(t)) return t;
    return base;
  };
  const auto is_placed = [](const Result& result) {
    return result.kind != Result::kUndefined && result.kind != Result::kArgument && result.kind != Result::kWatched;
  };
  for (size_t i = 0; i < results.size(); i++) {
    auto& result = call_.results[i];
    if (!is_placed(result) || result.requires_grad || !results[i].is_view()) continue;
    const at::Tensor base(results[i]._base());
    const auto number = number_of(base);
    if (number == bases.size()) {
      const auto stands = seen(base);
      const auto from = place(stands, in_rust);
      const auto is_base = [&](const at::Tensor& t) { return t.is_same(base); };
      const bool is_made = stands.is_same(base) && from && is_placed(*from);
      if (!from || (is_made && base.requires_grad() && std::none_of(results.begin(), results.end(), is_base)))
        return refuse("it returns a view of a tensor from within the call. Return a copy (clone())");
      call_.bases.push_back(*from), bases.push_back(base);
    }
    result.view = View{number, false, torch::autograd::impl::get_view_autograd_meta(results[i])->get_creation_meta()};
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto number = results[i].defined() ? number_of(results[i]) : bases.size();
    if (number < bases.size() && is_placed(call_.results[i]))
      call_.results[i].view = View{number, true, torch::autograd::CreationMeta::DEFAULT};
  }
}

std::optional<Cut> Recorder::find_graph(at::TensorList results, bool has_backward) {
  std::vector<at::Tensor> attached;
  for (size_t i = 0; i < results.size(); i++) {
    const auto& result = call_.results[i];
    if (result.requires_grad && !result.is_consumed) attached.push_back(results[i]);
  }
  if (attached.empty() || !call_.refusal.empty()) return std::nullopt;
  if (attached.size() > Cut::kMostRoots) {
    refuse("it returns more than 64 tensors that require grad. Stack them");
    return std::nullopt;
  }
  if (has_backward) {
    refuse("it runs a backward pass, and returns another result that requires grad");
    return std::nullopt;
  }
  // A write to one of these tensors would be an operator in the graph of the other.
  for (size_t i = 0; i < attached.size(); i++)
    for (size_t j = 0; j < i; j++)
      if (identity(attached[i]) == identity(attached[j]) && may_overlap(attached[i], attached[j])) {
        refuse("it returns several tensors on the same memory that require grad. Return copies (clone())");
        return std::nullopt;
      }
  auto graph = cut_out(attached, arguments_, first_node_);
  if (!graph.refusal.empty()) {
    refuse(graph.refusal);
    return std::nullopt;
  }
  for (const auto& edge : graph.targets) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    const auto is_target = [&](const at::Tensor& t) {
      if (!t.defined() || !t.requires_grad()) return false;
      return leaf ? t.is_same(leaf->variable) : t.grad_fn() == edge.function && t.output_nr() == edge.input_nr;
    };
    const auto argument = std::find_if(arguments_.begin(), arguments_.end(), is_target);
    const auto seen = leaf ? seen_.find(leaf->variable.unsafeGetTensorImpl()) : seen_.end();
    if (argument != arguments_.end() && !is_tandem(*argument)) refuse("an argument on the host requires grad");
    if (!accepts_shape_of(leaf ? leaf->variable : *argument, edge))
      refuse("a leaf has another shape than when a graph of autograd began to use it, and that graph still exists");
    if (argument != arguments_.end())
      call_.targets.push_back({true, static_cast<size_t>(argument - arguments_.begin())});
    else if (seen != seen_.end())
      call_.targets.push_back({false, seen->second});
    else
      refuse("a result that requires grad depends on a leaf that the call has made");
  }
  if (!call_.refusal.empty()) return std::nullopt;
  call_.joint_roots = joint_roots(graph);
  call_.steps = graph.steps;
  call_.nodes = at::sequence_number::peek() - first_node_;
  return graph;
}

void Recorder::attach(int64_t id, Cut&& graph, Surroundings&& around, std::vector<at::Tensor>& results) const {
  std::vector<at::Tensor> attached;
  std::vector<torch::autograd::CreationMeta> creations;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < results.size(); i++) {
    if (!call_.results[i].requires_grad || call_.results[i].kind != Result::kKept) continue;
    numbers.push_back(i);
    attached.push_back(results[i]);
    creations.push_back(call_.results[i].creation);
  }
  attached = attach_recorded(id, std::move(graph), std::move(around), attached, creations);
  for (size_t i = 0; i < numbers.size(); i++) results[numbers[i]] = std::move(attached[i]);
}

void Recorder::refuse_kept(const TtRecorded& in_rust) {
  std::vector<bool> owned;
  for (size_t i = 0; i < in_rust.n_kept; i++) owned.push_back(!in_rust.kept[i].is_kept);
  for (const auto& result : call_.results)
    if (result.kind == Result::kKept) owned[result.index] = true;
  for (const auto& left : call_.gradients)
    if (left.gradient.kind == Result::kKept) owned[left.gradient.index] = true;
  for (size_t i = 0; i < owned.size(); i++)
    if (!owned[i]) tt_record_keeps(in_rust.id, in_rust.kept[i].storage);
}

Surroundings Recorder::surroundings(at::TensorList results, const TtRecorded& in_rust) const {
  Surroundings around;
  around.arguments = arguments_;
  for (size_t i = 0; i < in_rust.n_kept; i++)
    around.saved.push_back(in_rust.kept[i].is_kept ? in_rust.kept[i].storage : nullptr);
  around.results.resize(in_rust.n_kept);
  for (size_t i = 0; i < results.size(); i++) {
    const auto& result = call_.results[i];
    if (result.kind == Result::kKept) around.results[result.index] = results[i].storage().getWeakStorageImpl();
  }
  for (const auto& w : call_.watched) around.reached.push_back(w.tensor);
  return around;
}

void Recorder::find_gradients(const TtRecorded& in_rust) {
  // Version counters whose writes are counted already: gradients may be views of other tensors.
  ska::flat_hash_set<const void*> counted;
  for (size_t i = 0; i < arguments_.size(); i++)
    if (call_.argument_writes[i] > 0)
      counted.insert(counter_of(arguments_[i].unsafeGetTensorImpl()->version_counter()));
  for (size_t i = 0; i < call_.watched.size(); i++)
    if (call_.watched_writes[i] > 0) counted.insert(counter_of(call_.watched[i].version));
  const auto look = [&](bool is_argument, size_t leaf, const at::Tensor& t, const Gradient& before) {
    const auto& grad = t.grad();
    if (!grad.defined() && !before.defined) return;
    auto gradient = place(grad, in_rust);
    const bool is_new = gradient && gradient->kind == Result::kKept;
    if (!is_new && grad.defined() && before.defined && identity(grad) == before.context) {
      const auto writes = version_of(grad) - before.version;
      if (writes > 0 && counted.insert(counter_of(grad.unsafeGetTensorImpl()->version_counter())).second)
        call_.written_gradients.push_back({is_argument, leaf, writes});
      return;
    }
    if (!gradient) return refuse("a gradient is a tensor that the call neither made nor was given");
    call_.gradients.push_back({is_argument, leaf, std::move(*gradient)});
  };
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto& t = arguments_[i];
    if (!is_tandem(t) || !t.is_leaf()) continue;
    look(true, i, t, call_.arguments[i].gradient);
  }
  for (size_t i = 0; i < call_.watched.size(); i++) {
    const auto& w = call_.watched[i];
    if (!w.is_leaf) continue;
    if (auto t = w.tensor.lock()) look(false, i, at::Tensor(std::move(t)), w.gradient);
  }
}

// Notes the storages that belong to watched tensors. Refuses results that count writes to their storage separately: in a
// replay, all results on a storage share the version counter of the tensor that the storage belongs to.
void Recorder::find_owners() {
  for (const auto& w : call_.watched) call_.owned.push_back(w.context);
  std::sort(call_.owned.begin(), call_.owned.end());
  std::unordered_map<size_t, const void*> counters;
  const auto expected = [&](const Result& result) {
    if (result.kind == Result::kKept) return counters.emplace(result.index, result.counter).first->second;
    if (result.kind == Result::kOnArgument)
      return counter_of(arguments_[result.index].unsafeGetTensorImpl()->version_counter());
    if (result.kind == Result::kOnWatched) return counter_of(call_.watched[result.index].version);
    const auto& given = call_.given[result.index];
    if (given.kind == Given::kArgument)
      return counter_of(arguments_[given.index].unsafeGetTensorImpl()->version_counter());
    const auto owns = [&](const Watched& w) { return given.kind == Given::kCaptured && w.context == given.context; };
    const auto owner = std::find_if(call_.watched.begin(), call_.watched.end(), owns);
    return owner == call_.watched.end() ? result.counter : counter_of(owner->version);
  };
  const auto look = [&](const Result& result) {
    if (result.kind == Result::kUndefined || result.kind == Result::kArgument || result.kind == Result::kWatched)
      return;
    if (expected(result) != result.counter)
      refuse("it returns tensors that share memory and count its writes apart (.data)");
  };
  for (const auto& result : call_.results) look(result);
  for (const auto& left : call_.gradients) look(left.gradient);
}

}  // namespace tandem
