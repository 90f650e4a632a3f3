// Collectives on lists of tensors of different sizes, which NCCL has and Gloo does not.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <vector>

namespace tandem {

using HostTensors = std::vector<at::Tensor>;

bool is_uneven(const HostTensors& tensors);
// These functions return when the call has ended.
void allgather_uneven(c10d::Backend& backend, const HostTensors& received, const at::Tensor& sent,
                      std::chrono::milliseconds timeout);
// Overwrites the sent tensors.
void reduce_scatter_uneven(c10d::Backend& backend, const at::Tensor& received, const HostTensors& sent,
                           const c10d::ReduceOp& op, std::chrono::milliseconds timeout);
// Handles all lists, even those whose sizes are equal, because a rank does not know the sizes on other ranks.
void alltoall(c10d::Backend& backend, const HostTensors& received, const HostTensors& sent,
              std::chrono::milliseconds timeout);

}  // namespace tandem
