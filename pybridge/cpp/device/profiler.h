// GraphRunner's kernels as device events of `torch.profiler`.
#pragma once

namespace tandem {

void register_profiler();

}  // namespace tandem
