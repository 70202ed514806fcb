// Workspaces for builds of indexes on a CUDA device.
#pragma once

#include <memory>

#include "gpu/kmeans.h"
#include "gpu/neighbours.h"

namespace keyhole::gpu {

/// On device `ordinal`. Both throw Error: unsupported without such a device, device_error.
[[nodiscard]] std::unique_ptr<NeighbourSearch> make_cuda_neighbours(int ordinal,
                                                                    const NeighbourConfig& config);
[[nodiscard]] std::unique_ptr<KMeans> make_cuda_kmeans(int ordinal, const KMeansConfig& config);

}  // namespace keyhole::gpu
