// What the rest needs of collectives: before a tensor is used that one of them is receiving, or before a wait for all
// work, the operator that receives it has to be issued.
#pragma once

#include <atomic>
#include <cstdint>

namespace tandem {

class Encoder;

// Number of collectives whose received tensors nothing has used so far.
extern std::atomic<uint32_t> in_flight;

// Issues the operators that receive tensors.
class Settler {
 public:
  virtual ~Settler() = default;
  // For the inputs of a call, before the call.
  virtual void settle(const Encoder& encoder) = 0;
  // For a storage, by its context, before it is resized.
  virtual void settle(const void* storage) = 0;
  virtual void settle_all() = 0;
};

// Set where `in_flight` is not 0.
extern Settler* settler;

// Issues them for all collectives, before a recording and before ops that are not encoded: replays.
inline void settle_all() {
  if (in_flight.load(std::memory_order_relaxed)) settler->settle_all();
}
// Waits for all pending work, collectives included.
void synchronize();

}  // namespace tandem
