// The type of this device in PyTorch, and the dispatch keys of its tensors.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>

namespace tandem {

constexpr c10::DeviceType kTandem = c10::DeviceType::PrivateUse1;
inline const c10::DispatchKeySet kTandemKeys{c10::DispatchKey::PrivateUse1};

}  // namespace tandem
