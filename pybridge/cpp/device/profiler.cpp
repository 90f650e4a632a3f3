#include "device/profiler.h"

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#if __has_include(<kineto/libkineto.h>)
#define TANDEM_HAS_KINETO 1
// Kineto's headers format numbers with fmt, which libtorch does not export.
#define FMT_HEADER_ONLY 1
#include <kineto/libkineto.h>
#include <kineto/output_base.h>
#endif

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "boundary/errors.h"
#include "boundary/shim.h"
#include "device/guard.h"

namespace tandem {

namespace {

#ifdef TANDEM_HAS_KINETO

// A recording of PyTorch's profiler: GraphRunner's kernels become events of the device.
class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    began_ = now();
    attempt([] { check(tt_begin_kernel_log()); });
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    attempt([this] { check(tt_end_kernel_log(&take, this)); });
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override { return errors_; }
  void processTrace(libkineto::ActivityLogger& logger) override {
    process(logger, [](int32_t) { return nullptr; }, began_, now());
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t start,
                    int64_t end) override {
    process(logger, linked, start, end);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return std::unique_ptr<libkineto::DeviceInfo>(
        new libkineto::DeviceInfo{0, libkineto::kExceedMaxPid, "Tandem", "tandem:0"});
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {{0, 0, 0, "GraphRunner"}}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  // PyTorch passes the calls that it records in the order in which they nest on each thread.
  void pushCorrelationId(uint64_t call) override {
    calls.push_back(call);
    tt_set_issuer(call);
  }
  void popCorrelationId() override {
    if (!calls.empty()) calls.pop_back();
    tt_set_issuer(calls.empty() ? 0 : calls.back());
  }

 private:
  struct Kernel {
    TtKernelRun run;
    std::string name, ops, lines;
  };

  static int64_t now() {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  static void take(void* session, const TtKernelRun* run) {
    static_cast<Session*>(session)->kernels_.push_back(
        {*run, {run->name, run->name_len}, {run->ops, run->ops_len}, {run->lines, run->lines_len}});
  }

  // Kineto does not expect exceptions, so they end here.
  template <class F>
  void attempt(F body) noexcept {
    try {
      body();
    } catch (const std::exception& e) {
      errors_.emplace_back(e.what());
      status_ = libkineto::TraceStatus::ERROR;
    }
  }

  template <class Linked>
  void process(libkineto::ActivityLogger& logger, Linked linked, int64_t start, int64_t end) {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start, end, "Tandem");
    buffer_->gpuOpCount = static_cast<int>(kernels_.size());
    int32_t number = 0;
    for (const auto& [run, name, ops, lines] : kernels_) {
      if (run.start_ns < start || run.end_ns > end) continue;
      buffer_->emplace_activity(buffer_->span, libkineto::ActivityType::CONCURRENT_KERNEL, name);
      auto& kernel = libkineto::CpuTraceBuffer::toRef(buffer_->activities.back());
      kernel.startTime = run.start_ns, kernel.endTime = run.end_ns;
      kernel.device = run.device;
      kernel.id = ++number;
      kernel.linked = run.issuer ? linked(static_cast<int32_t>(run.issuer)) : nullptr;
      kernel.addMetadataQuoted("operators", ops);
      kernel.addMetadataQuoted("lines", lines);
      kernel.log(logger);
    }
    kernels_.clear();
  }

  // Numbers of the calls that PyTorch records on this thread, outermost first.
  static thread_local std::vector<uint64_t> calls;

  int64_t began_ = 0;
  std::vector<Kernel> kernels_;
  std::vector<std::string> errors_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

thread_local std::vector<uint64_t> Session::calls;

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<libkineto::ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config&) override {
    if (!types.count(libkineto::ActivityType::CONCURRENT_KERNEL)) return nullptr;
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t,
                                                                 const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config& config) override {
    return configure(types, config);
  }

 private:
  const std::string name_ = "Tandem";
  const std::set<libkineto::ActivityType> types_ = {libkineto::ActivityType::CONCURRENT_KERNEL};
};

#endif

// Times between two points of the program, for PyTorch's profiler that works without Kineto.
class Stubs final : public torch::profiler::impl::ProfilerStubs {
  using Time = std::chrono::steady_clock::time_point;
  using Event = torch::profiler::impl::ProfilerVoidEventStub;

 public:
  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    // PyTorch makes a record at each call that it observes, and inside a kernel this must not wait.
    tt_hide_kernels();
    check(tt_synchronize());
    const auto now = std::chrono::steady_clock::now();
    if (device) *device = current_device();
    if (cpu_ns) *cpu_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    *event = std::make_shared<Time>(now);
  }
  float elapsed(const Event* from, const Event* to) const override {
    const auto time = *static_cast<Time*>(to->get()) - *static_cast<Time*>(from->get());
    return std::chrono::duration<float, std::micro>(time).count();
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> each) const override {
    for (int device = 0; device < tt_device_count(); device++) each(device);
  }
  void synchronize() const override { check(tt_synchronize()); }
};

}  // namespace

void register_profiler() {
  static Stubs stubs;
  torch::profiler::impl::registerPrivateUse1Methods(&stubs);
#ifdef TANDEM_HAS_KINETO
  // Newer versions of PyTorch have a registry of profilers, which calls this function.
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
#endif
}

}  // namespace tandem

extern "C" int32_t ttc_observe_calls(int32_t on) {
  const auto before = at::isRecordFunctionEnabled();
  at::enableRecordFunction(on != 0);
  return before;
}
