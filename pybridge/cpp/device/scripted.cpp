// The state of `torch.jit.trace`.
#include <torch/csrc/jit/frontend/tracer.h>

#include "boundary/shim.h"

extern "C" int32_t ttc_is_scripted() { return torch::jit::tracer::isTracing() ? 1 : 0; }
