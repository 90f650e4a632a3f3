// torch.distributed's operators on tandem tensors.
#pragma once

namespace tandem {

// Registers the kernels of c10d's operators.
void register_collectives();

}  // namespace tandem
