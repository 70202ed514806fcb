// Parts of one session, and workspaces, on a CUDA device: each call asks a gpu::Device of its own, as nothing that one
// made needs it any more.
#pragma once

#include <memory>

#include "gpu/blocked.h"
#include "gpu/codes.h"
#include "gpu/device.h"
#include "gpu/kmeans.h"
#include "gpu/listed.h"
#include "gpu/neighbours.h"
#include "gpu/prompt.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

/// memory_limit: of the session; 0: what there is.
inline std::unique_ptr<Resident> make_cuda_resident(const ResidentShape& shape,
                                                    const CudaConfig& config,
                                                    size_t memory_limit = 0) {
  const auto session = std::make_shared<SessionOnDevice>();
  session->memory_limit = memory_limit;
  return make_cuda_device(config)->make_resident(shape, session);
}
inline std::unique_ptr<Codes> make_cuda_codes(Resident& resident, const CodesShape& shape) {
  return make_cuda_device({})->make_codes(resident, shape);
}
inline std::unique_ptr<Windows> make_cuda_windows(Resident& resident, const WindowsShape& shape) {
  return make_cuda_device({})->make_windows(resident, shape);
}
inline std::unique_ptr<BlockedAttention> make_cuda_blocked(Resident& resident,
                                                           const BlockedShape& shape) {
  return make_cuda_device({})->make_blocked(resident, shape);
}
inline std::unique_ptr<ListedAttention> make_cuda_listed(Resident& resident,
                                                         const BlockedShape& shape) {
  return make_cuda_device({})->make_listed(resident, shape);
}
inline std::unique_ptr<NeighbourSearch> make_cuda_neighbours(const NeighbourConfig& config,
                                                             int ordinal = 0) {
  return make_cuda_device({.ordinal = ordinal})->make_neighbours(config);
}
inline std::unique_ptr<KMeans> make_cuda_kmeans(const KMeansConfig& config, int ordinal = 0) {
  return make_cuda_device({.ordinal = ordinal})->make_kmeans(config);
}

}  // namespace keyhole::gpu
