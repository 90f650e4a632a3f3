// PyTorch's parallel loops, and the settings of a thread that CPU kernels read.
#include "device/threads.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "boundary/shim.h"

// PyTorch's OpenMP library, if it was built with one.
extern "C" __attribute__((weak)) void omp_set_num_threads(int n);

bool tandem::flushes_denormals() {
#if defined(__x86_64__) || defined(_M_X64)
  return (_mm_getcsr() & 0x8040) == 0x8040;
#else
  return false;
#endif
}

void tandem::initialize_vector_math() { at::erf(at::zeros({1})); }

// The setting belongs to the calling thread. `at::set_num_threads` would change it for threads that are yet to start,
// and drop oneDNN's caches.
tandem::OneThread::OneThread(bool on) {
  if (!on || omp_set_num_threads == nullptr) return;
  before_ = at::get_num_threads();
  omp_set_num_threads(1);
}
tandem::OneThread::~OneThread() {
  if (before_ != 0) omp_set_num_threads(before_);
}

extern "C" {

void ttc_parallel_for(size_t n, size_t grain, void (*part)(const void*, size_t, size_t), const void* body) {
  at::parallel_for(0, static_cast<int64_t>(n), static_cast<int64_t>(grain),
                   [&](int64_t from, int64_t to) { part(body, from, to); });
}
uint32_t ttc_num_threads() { return static_cast<uint32_t>(at::get_num_threads()); }

int32_t ttc_thread_settings() { return at::get_num_threads() << 1 | int32_t{tandem::flushes_denormals()}; }
void ttc_use_thread_settings(int32_t settings) {
  if (at::get_num_threads() != settings >> 1) at::set_num_threads(settings >> 1);
  if (tandem::flushes_denormals() != (settings & 1)) at::globalContext().setFlushDenormal(settings & 1);
}
void ttc_enter_graph_runner() { at::init_num_threads(); }
}
