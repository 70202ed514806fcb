// All rivals that compare knows.
#pragma once

#include <memory>
#include <span>

#include "tools/rivals/params.h"

namespace keyhole::tools {

/// In the order of the help; those that this build lacks are there with RivalType::needs.
[[nodiscard]] std::span<const RivalType* const> rival_types();

// Each in its own file.
extern const RivalType kFaissIvf, kFaissIvfPq, kFaissHnsw;
extern const RivalType kHnswlib;
extern const RivalType kLshSampling;
extern const RivalType kPageBounds;
extern const RivalType kBlockRepresentatives;
extern const RivalType kRandomSample;

}  // namespace keyhole::tools
