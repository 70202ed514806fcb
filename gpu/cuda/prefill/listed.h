// ListedAttention with other sizes than gpu/listed.h gives it.
#pragma once

#include <memory>

#include "gpu/listed.h"

namespace keyhole::gpu {

/// lot_bytes: of K and V of the heads that lie on the device together, one at least.
[[nodiscard]] std::unique_ptr<ListedAttention> make_cuda_listed(Resident& resident,
                                                                const BlockedShape& shape,
                                                                size_t lot_bytes);

}  // namespace keyhole::gpu
