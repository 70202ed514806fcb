// Makes a ListedAttention with other sizes than gpu/listed.h gives it.
#pragma once

#include <memory>

#include "gpu/listed.h"

namespace keyhole::gpu {

/// lot_bytes: bytes of the K and V that lie on the device at a time, those of one head at least.
[[nodiscard]] std::unique_ptr<ListedAttention> make_cuda_listed(Resident& resident,
                                                                const BlockedShape& shape,
                                                                size_t lot_bytes);

}  // namespace keyhole::gpu
