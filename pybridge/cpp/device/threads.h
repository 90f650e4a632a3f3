// Preparation of the libraries that CPU kernels call on several threads.
#pragma once

namespace tandem {

// Initializes MKL's vector functions, which ATen calls for erf, tanh and others. The functions initialize themselves at
// their first call, but not safely: if two threads make the first call at once, one of them computed with errors of
// 1e-4 in about one of 5,000 processes (MKL 2024.2, torch 2.15).
void initialize_vector_math();

}  // namespace tandem
