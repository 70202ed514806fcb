// HostCopies of a CUDA device.
#pragma once

#include <memory>

#include "gpu/copy.h"

namespace keyhole::gpu {

/// Between the current device of each call and the host. Throws Error(out_of_memory) without pinned memory (2 x 8 MiB).
[[nodiscard]] std::unique_ptr<HostCopies> make_host_copies();

}  // namespace keyhole::gpu
