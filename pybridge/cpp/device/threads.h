// Threads of PyTorch's CPU kernels, and the preparation of the libraries that they call.
#pragma once

namespace tandem {

// Initializes MKL's vector functions, which ATen calls for erf, tanh and others. The functions initialize themselves at
// their first call, but not safely: if two threads make the first call at once, one of them computed with errors of
// 1e-4 in about one of 5,000 processes (MKL 2024.2, torch 2.15).
void initialize_vector_math();

// Whether this thread flushes denormal numbers to zero.
bool flushes_denormals();

// PyTorch's kernels use one thread of the calling thread's OpenMP team while the object exists, if `on`.
class OneThread {
 public:
  explicit OneThread(bool on);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = 0;
};

}  // namespace tandem
