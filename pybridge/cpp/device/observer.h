// Observation of operators while a call of a function is recorded, or a graph is captured.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace tandem {

class Encoder;

// Whether a call of a function is being recorded, or a graph is being captured.
extern bool is_recording;

// Observer of the operators of a captured graph.
class Observer {
 public:
  virtual ~Observer() = default;
  // Notes an operator that the program's thread calls, before the call.
  virtual void note(uint32_t op, const Encoder& encoder) = 0;
  // Notes a storage that was made for a tensor.
  virtual void made(const c10::intrusive_ptr<c10::StorageImpl>& storage) = 0;
};

// The observer, or null.
extern Observer* observer;
// Begins observing with `next`, or ends observing if it is null.
void observe_operators(Observer* next);

}  // namespace tandem
