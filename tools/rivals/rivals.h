// The table of all rivals that compare knows.
#pragma once

#include <memory>
#include <span>

#include "tools/rivals/params.h"

namespace keyhole::tools {

/// All rivals in the order of the help; those that this build lacks have RivalType::needs.
[[nodiscard]] std::span<const RivalType* const> rival_types();

// The declarations, each in the file of its rival.
extern const RivalType kFaissIvf, kFaissIvfPq, kFaissHnsw;
extern const RivalType kHnswlib;
extern const RivalType kLshSampling;
extern const RivalType kPageBounds;
extern const RivalType kBlockRepresentatives;
extern const RivalType kRandomSample;
extern const RivalType kCacheQ8, kCacheQ4, kCacheKivi2, kCacheKivi4, kCacheKvarn2, kCacheKvarnK4V2,
    kCacheOscar2;

}  // namespace keyhole::tools
