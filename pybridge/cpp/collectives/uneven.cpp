#include "collectives/uneven.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstdint>

namespace tandem {

namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

void wait(const Works& works, std::chrono::milliseconds timeout) {
  for (const auto& work : works) work->wait(std::max(timeout, std::chrono::milliseconds(kNoTimeout)));
}

// The elements of all tensors in one row. `sizes` receives the number of elements of each tensor.
at::Tensor row(const HostTensors& tensors, std::vector<int64_t>& sizes) {
  HostTensors flat;
  for (const auto& t : tensors) {
    sizes.push_back(t.numel());
    flat.push_back(t.reshape({-1}));
  }
  return at::cat(flat);
}

}  // namespace

bool is_uneven(const HostTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& t) { return t.numel() != tensors.front().numel(); });
}

void allgather_uneven(c10d::Backend& backend, const HostTensors& received, const at::Tensor& sent,
                      std::chrono::milliseconds timeout) {
  const auto& own = received[backend.getRank()];
  TORCH_CHECK(own.numel() == sent.numel(), "this rank sends ", sent.numel(), " elements, and receives ", own.numel(),
              " from itself");
  own.view({-1}).copy_(sent.view({-1}));
  Works works;
  for (size_t rank = 0; rank < received.size(); rank++) {
    c10d::BroadcastOptions options;
    options.rootRank = static_cast<int64_t>(rank);
    options.timeout = timeout;
    HostTensors tensors{received[rank]};
    works.push_back(backend.broadcast(tensors, options));
  }
  wait(works, timeout);
}

void reduce_scatter_uneven(c10d::Backend& backend, const at::Tensor& received, const HostTensors& sent,
                           const c10d::ReduceOp& op, std::chrono::milliseconds timeout) {
  Works works;
  for (size_t rank = 0; rank < sent.size(); rank++) {
    c10d::ReduceOptions options;
    options.reduceOp = op;
    options.rootRank = static_cast<int64_t>(rank);
    options.timeout = timeout;
    HostTensors tensors{sent[rank]};
    works.push_back(backend.reduce(tensors, options));
  }
  wait(works, timeout);
  const auto& own = sent[backend.getRank()];
  TORCH_CHECK(own.numel() == received.numel(), "this rank receives ", received.numel(), " elements, and sends ",
              own.numel(), " to itself");
  received.view({-1}).copy_(own.view({-1}));
}

void alltoall(c10d::Backend& backend, const HostTensors& received, const HostTensors& sent,
              std::chrono::milliseconds timeout) {
  std::vector<int64_t> received_sizes, sent_sizes;
  auto from = row(sent, sent_sizes), to = row(received, received_sizes);
  c10d::AllToAllOptions options;
  options.timeout = timeout;
  const auto parts = to.split_with_sizes(received_sizes);
  // Of the backend's functions, only this one takes sizes.
  wait({backend.alltoall_base(to, from, received_sizes, sent_sizes, options)}, timeout);
  for (size_t rank = 0; rank < received.size(); rank++) received[rank].view({-1}).copy_(parts[rank]);
}

}  // namespace tandem
