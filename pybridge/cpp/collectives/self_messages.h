// Messages of a rank to itself, for which Gloo has no connection.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>

namespace tandem {

// Sends a host tensor to this rank. The tensor is kept until the message is received.
c10::intrusive_ptr<c10d::Work> send_to_self(const c10::intrusive_ptr<c10d::Backend>& backend, int64_t tag,
                                            const at::Tensor& sent);
// Receives the next message with this tag.
c10::intrusive_ptr<c10d::Work> receive_from_self(const c10::intrusive_ptr<c10d::Backend>& backend, int64_t tag,
                                                 const at::Tensor& received);

}  // namespace tandem
