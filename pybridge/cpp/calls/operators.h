// Operators and their op ids.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>

namespace tandem {

// The name of an operator with its overload, such as "aten::add.Tensor".
std::string full_name(const c10::OperatorName& name);
// Returns the id of an operator. The first call for an operator declares it to Rust.
uint32_t declare(const c10::OperatorHandle& handle);
const c10::OperatorHandle& handle_of(uint32_t op);

}  // namespace tandem
