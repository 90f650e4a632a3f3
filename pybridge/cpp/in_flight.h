// Tensors that collectives are receiving.
#pragma once

#include <atomic>
#include <memory>

#include "collective.h"
#include "encode.h"

namespace tandem {

// Number of collectives whose received tensors nothing has used so far.
extern std::atomic<uint32_t> in_flight;

// Issues the operator that starts a collective, and sends it to GraphRunner. Notes the tensors that are received.
void start(const std::shared_ptr<Collective>& collective);
// Issues tandem::collective_wait for the collectives that receive an input of a call, before the call.
void settle(const Encoder& encoder);
// Waits for all pending work, collectives included.
void synchronize();

}  // namespace tandem
