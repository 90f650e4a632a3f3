// Whether the program's "cuda" is this device.
#pragma once

namespace tandem {

extern bool is_cuda_alias;

}  // namespace tandem
