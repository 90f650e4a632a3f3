// Collectives on lists of tensors of several sizes, which NCCL has and Gloo does not.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <vector>

namespace tandem {

using HostTensors = std::vector<at::Tensor>;

bool is_uneven(const HostTensors& tensors);
// They return when the call has ended.
void allgather_uneven(c10d::Backend& backend, const HostTensors& received, const at::Tensor& sent,
                      std::chrono::milliseconds timeout);
// Overwrites what is sent.
void reduce_scatter_uneven(c10d::Backend& backend, const at::Tensor& received, const HostTensors& sent,
                           const c10d::ReduceOp& op, std::chrono::milliseconds timeout);
// For all lists: a rank does not know whether those of the others are even.
void alltoall(c10d::Backend& backend, const HostTensors& received, const HostTensors& sent,
              std::chrono::milliseconds timeout);

}  // namespace tandem
