// The outputs of a call as tensors and values, from their records.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <utility>

#include "boundary/shim.h"
#include "calls/encode.h"

namespace tandem {

// Converts output records to tensors and values. A storage that several outputs share is created once.
class Decoder {
 public:
  Decoder(const TtOuts& outs, const Encoder& encoder) : outs_(outs), encoder_(encoder) {}

  c10::IValue next();
  // Returns the next output, which must be a tensor.
  at::Tensor next_tensor() { return tensor(outs_.outs[at_++]); }
  bool done() const { return at_ == outs_.n_outs; }

 private:
  at::Tensor tensor(const TtOut& out);
  c10::intrusive_ptr<c10::StorageImpl> storage(const TtOut& out);

  const TtOuts& outs_;
  const Encoder& encoder_;
  size_t at_ = 0;
  c10::SmallVector<std::pair<void*, c10::intrusive_ptr<c10::StorageImpl>>, 2> made_;
};

}  // namespace tandem
