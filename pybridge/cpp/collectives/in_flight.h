// Tensors that collectives are receiving.
#pragma once

#include <memory>

#include "collectives/collective.h"

namespace tandem {

// Issues the operator that starts a collective, and sends the operator to GraphRunner. Notes the tensors that are
// received.
void start(const std::shared_ptr<Collective>& collective);

}  // namespace tandem
