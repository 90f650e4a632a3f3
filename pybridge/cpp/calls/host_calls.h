// Estimates how many operators the program calls on host tensors, which do not run on Tandem.
#pragma once

namespace tandem {

// Starts counting.
void count_host_calls();

}  // namespace tandem
