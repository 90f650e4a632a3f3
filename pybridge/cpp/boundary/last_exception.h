// The message of the latest exception that a kernel raised. Collectives that are skipped because an operator failed
// tell it to the other ranks.
#pragma once

#include <string>

namespace tandem {

// Returns the first line of the message, or "" if no kernel has raised an exception.
std::string last_exception();

}  // namespace tandem
