// Collectives for the files that do not know them. The operator that receives a tensor has to be issued before the
// tensor is used, and before a wait for all work.
#pragma once

#include <atomic>
#include <cstdint>

namespace tandem {

class Encoder;

// Number of collectives whose received tensors have not been used yet.
extern std::atomic<uint32_t> in_flight;

// Issues the operators that receive tensors.
class Settler {
 public:
  virtual ~Settler() = default;
  // Issues the operators for the inputs of a call, before the call.
  virtual void settle(const Encoder& encoder) = 0;
  // Issues the operators for a storage, given by its context, before the storage is resized.
  virtual void settle(const void* storage) = 0;
  virtual void settle_all() = 0;
};

// The settler, which is set if `in_flight` is not 0.
extern Settler* settler;

// Issues the operators for all collectives. Needed before a recording, and before a replay, because the ops of a replay
// are not encoded one by one and would not settle their inputs.
inline void settle_all() {
  if (in_flight.load(std::memory_order_relaxed)) settler->settle_all();
}
// Waits for all pending work, including collectives.
void synchronize();

}  // namespace tandem
