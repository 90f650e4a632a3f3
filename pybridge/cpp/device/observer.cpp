#include "device/observer.h"

namespace tandem {

bool is_recording = false;
Observer* observer = nullptr;

void observe_operators(Observer* next) {
  observer = next;
  is_recording = next != nullptr;
}

}  // namespace tandem
