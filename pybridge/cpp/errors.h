// Exceptions that cross Rust: kept as handles, raised again with eager's type.
#pragma once

#include <exception>

namespace tandem {

void keep_exception(std::exception_ptr e);

}  // namespace tandem
