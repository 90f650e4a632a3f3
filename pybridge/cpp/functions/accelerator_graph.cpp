// torch.accelerator.Graph: operators that are captured once, and replayed on the same tensors.
//
// Tandem captures operators by running them, because the shapes of their results are not known before. Afterwards,
// tensors that existed before the capture, and the random generator, are restored, so that, as on other devices, only a
// replay has effects.
#include <torch/version.h>
// torch 2.15 introduced the interface.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#include <ATen/ATen.h>
#include <ATen/core/GraphImplInterface.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "boundary/errors.h"
#include "calls/function.h"
#include "device/device_type.h"
#include "device/generator.h"
#include "device/settling.h"
#include "device/storage.h"
#include "functions/recorded.h"

namespace tandem {

namespace {

// The operators of a capture, and the storages that they use.
class Capture final : public Observer {
 public:
  Capture() : state_(default_generator().get_state()) {
    TORCH_CHECK(tt_record_begin(), "tandem: graphs are captured on the thread that runs the program");
    observe_operators(this);
  }
  ~Capture() override {
    if (!is_open_) return;
    observe_operators(nullptr);
    tt_record_cancel();
  }

  void note(uint32_t op, const Encoder& encoder) override;
  void made(const c10::intrusive_ptr<c10::StorageImpl>& storage) override {
    made_.insert_or_assign(storage->mutable_data_ptr().get_context(), WeakStorage(storage));
  }

  // Ends the capture, and undoes the operators' writes.
  TtRecorded end();
  // Storages by context: those that existed before the capture, and those that the capture has made and that the
  // program still has.
  c10::Storage given(void* context) const { return given_.at(context); }
  c10::Storage kept(void* context) const {
    auto storage = made_.at(context).lock();
    TORCH_INTERNAL_ASSERT(storage, "a tensor that the program has is gone");
    return c10::Storage(std::move(storage));
  }

 private:
  void save(const c10::Storage& storage);

  bool is_open_ = true;
  at::Tensor state_;
  std::unordered_map<void*, c10::Storage> given_;
  std::unordered_map<void*, WeakStorage> made_;
  // Storages that operators write, each with its bytes before the capture.
  std::unordered_map<void*, std::pair<at::Tensor, at::Tensor>> saved_;
};

void Capture::note(uint32_t op, const Encoder& encoder) {
  size_t input = 0;
  for (size_t i = 0; i < encoder.size(); i++) {
    const auto& argument = encoder.args()[i];
    const size_t n = argument.tag == TT_TENSOR ? 1 : argument.tag == TT_TENSORS ? argument.len : 0;
    for (size_t k = 0; k < n; k++, input++) {
      const auto& t = encoder.input(input);
      if (!t.defined() || t.device().type() != kTandem || made_.count(identity(t))) continue;
      given_.try_emplace(identity(t), t.storage());
      if (tt_writes(op, i)) save(t.storage());
    }
  }
}

void Capture::save(const c10::Storage& storage) {
  void* context = storage.unsafeGetStorageImpl()->mutable_data_ptr().get_context();
  if (saved_.count(context)) return;
  observe_operators(nullptr);
  tt_record_pause();
  auto bytes = bytes_of(storage);
  auto before = bytes.clone();
  saved_.emplace(context, std::pair(std::move(bytes), std::move(before)));
  tt_record_resume();
  observe_operators(this);
}

TtRecorded Capture::end() {
  is_open_ = false;
  observe_operators(nullptr);
  TtRecorded recorded{};
  tt_record_end(&recorded);
  for (auto& [context, saved] : saved_) saved.first.copy_(saved.second);
  auto generator = default_generator();
  if (recorded.draws) generator.set_state(state_);
  return recorded;
}

class AcceleratorGraph final : public at::GraphImplInterface {
 public:
  explicit AcceleratorGraph(const at::GraphImplArgs&) {}
  ~AcceleratorGraph() override { reset(); }

  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    TORCH_CHECK(!is_recording, "tandem: a graph cannot be captured while another graph or a function is recorded");
    settle_all();
    reset();
    capture_ = std::make_unique<Capture>();
  }
  void capture_end() override;
  void instantiate() override { TORCH_CHECK(id_ >= 0, "tandem: the graph has not been captured"); }
  void replay() override;
  void reset() override;
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "tandem does not write captured graphs to files; torch_tandem.save_graph writes the program's graph");
  }

 private:
  std::unique_ptr<Capture> capture_;
  int64_t id_ = -1;
  std::vector<TtGiven> given_;
  std::vector<c10::Storage> held_;
  // The bytes of tensors that the capture has made. Each replay writes them.
  std::vector<at::Tensor> results_;
};

void AcceleratorGraph::capture_end() {
  TORCH_CHECK(capture_, "tandem: capture_end() without capture_begin()");
  const auto capture = std::move(capture_);
  const auto recorded = capture->end();
  id_ = recorded.id;
  for (size_t i = 0; i < recorded.n_given; i++) {
    given_.push_back({recorded.given[i], 0});
    held_.push_back(capture->given(recorded.given[i]));
  }
  for (size_t i = 0; i < recorded.n_kept; i++) results_.push_back(bytes_of(capture->kept(recorded.kept[i].storage)));
  try {
    check(tt_record_make_template(id_));
  } catch (const c10::Error& e) {
    reset();
    TORCH_CHECK(false, "tandem: this graph cannot be captured: ", e.what_without_backtrace());
  }
}

void AcceleratorGraph::replay() {
  TORCH_CHECK(id_ >= 0, "tandem: the graph has not been captured");
  TORCH_CHECK(!observer && tt_is_program(),
              "tandem: graphs are replayed on the thread that runs the program, and not "
              "within another graph");
  if (is_recording) note_refusal("it replays a graph of torch.accelerator");
  const TtStage stage{id_, 0, given_.data(), given_.size(), nullptr, 0, nullptr, 0};
  TtReplayed replayed{};
  settle_all();
  check(tt_replay(&stage, &replayed));
  TORCH_CHECK(!replayed.is_stale,
              "tandem: all graphs have been forgotten since this one was captured; capture it again");
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < replayed.n_kept; i++) {
    const auto& kept = replayed.kept[i];
    const auto device = static_cast<c10::DeviceIndex>(kept.device);
    made.push_back(bytes_of(c10::Storage(adopt_storage(kept.storage, kept.address, kept.nbytes, device))));
  }
  for (size_t i = 0; i < made.size(); i++) results_[i].copy_(made[i]);
}

void AcceleratorGraph::reset() {
  capture_.reset();
  if (id_ >= 0) tt_record_drop(id_);
  id_ = -1;
  given_.clear(), held_.clear(), results_.clear();
}

}  // namespace

}  // namespace tandem

namespace at {

using TandemGraph = tandem::AcceleratorGraph;
REGISTER_GRAPH_IMPL(TANDEM, TandemGraph)

}  // namespace at
#endif
