// PyTorch's hooks for this device, from which its device-independent code gets devices, generators and pinned memory.
#pragma once

namespace tandem {

void register_hooks();

}  // namespace tandem
