// The message of the last exception that a kernel raised: what collectives tell the other ranks, where the operators
// that call them are skipped.
#pragma once

#include <string>

namespace tandem {

// Returns its first line, or "" if there was none.
std::string last_exception();

}  // namespace tandem
