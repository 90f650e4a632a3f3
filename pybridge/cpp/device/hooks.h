// PyTorch's hooks for this device. Through them, PyTorch's device-independent code gets devices, generators and pinned
// memory.
#pragma once

namespace tandem {

void register_hooks();

}  // namespace tandem
