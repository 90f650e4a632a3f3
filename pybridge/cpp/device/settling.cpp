#include "device/settling.h"

#include <torch/library.h>

#include "boundary/errors.h"
#include "boundary/shim.h"

namespace tandem {

std::atomic<uint32_t> in_flight{0};
Settler* settler = nullptr;

void synchronize() {
  settle_all();
  check(tt_synchronize());
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) { m.def("synchronize() -> ()", synchronize); }

}  // namespace tandem
