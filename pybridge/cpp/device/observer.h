// What observes operators while a call of a function is recorded, or a graph captured.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace tandem {

class Encoder;

// Whether a call of a function is being recorded, or a graph captured.
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
// Begins or, with null, ends observing.
void observe_operators(Observer* next);

}  // namespace tandem
