// Pinned memory, which is ordinary host memory here.
#pragma once

#include <c10/core/Allocator.h>

namespace tandem {

c10::Allocator* pinned_allocator();
// Whether an address is in memory that pinned_allocator() has allocated.
bool is_pinned(const void* pointer);

}  // namespace tandem
