// Calls of ATen's CPU kernels on Tandem's buffers, on GraphRunner's thread or on a waiting thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace tandem {

// Outputs of this thread's latest call that are not tensors.
std::vector<c10::IValue>& host_values();
// Number of tensors of a written list that PyTorch's kernel had written when it last failed on this thread.
uint32_t& written_before_failure();

}  // namespace tandem
