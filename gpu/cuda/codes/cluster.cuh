// Barrier and shared memory of the thread blocks of a cluster (compute capability 9.0).
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace keyhole::gpu::codes {

/// The two halves of a barrier over all threads of the cluster; writes before the first are visible after the second.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/// The first half without the wait for this thread's writes, for where no earlier write need be visible.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

/// The same variable in the shared memory of the cluster's block `rank`.
template <class T>
__device__ inline T* in_block(T* mine, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return mine;  // never called: kernels for clusters are empty there
#else
  return cooperative_groups::cluster_group::map_shared_rank(mine, static_cast<int>(rank));
#endif
}

}  // namespace keyhole::gpu::codes
