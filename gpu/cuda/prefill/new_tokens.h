// Attention of many new tokens of a session on a CUDA device: over all rows, and over those that patterns choose.
#pragma once

#include <cstddef>
#include <memory>

#include "gpu/blocked.h"
#include "gpu/listed.h"
#include "gpu/listed_layout.h"
#include "gpu/resident.h"

namespace keyhole::gpu {

/// For the session whose resident tokens lie at `place`, which outlive it. Both take memory when they are used, and
/// throw Error(unsupported): why_no_blocked().
[[nodiscard]] std::unique_ptr<BlockedAttention> make_cuda_blocked(const ResidentPlace& place,
                                                                  const BlockedShape& shape);
/// lot_bytes: of K and V of the heads that lie on the device together, one head's at least.
[[nodiscard]] std::unique_ptr<ListedAttention> make_cuda_listed(const ResidentPlace& place,
                                                                const BlockedShape& shape,
                                                                size_t lot_bytes = kListedLotBytes);

}  // namespace keyhole::gpu
