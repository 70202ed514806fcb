// HostCopies of a CUDA device.
#pragma once

#include <memory>

#include "gpu/copy.h"

namespace keyhole::gpu {

/// Between CUDA device `ordinal`, whose streams are given, and the host. Throws Error(out_of_memory) without pinned
/// memory (2 x 8 MiB), Error(device_error).
[[nodiscard]] std::unique_ptr<HostCopies> make_host_copies(int ordinal);

}  // namespace keyhole::gpu
