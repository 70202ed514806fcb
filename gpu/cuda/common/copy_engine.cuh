// Copies of tiles by the copy engine (cp.async.bulk.tensor, compute capability 9.0 and newer), and the barriers in
// shared memory by which the threads that copy and those that compute wait for each other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/cuda/common/async_copy.cuh"

namespace keyhole::gpu {

/// A barrier in shared memory; 8 bytes, aligned. A phase ends when all have arrived and all announced bytes have
/// come. Waits name the phase's parity: 0 for the first, 1 for the second, 0 for the third.
struct alignas(8) CopyBarrier {
  uint64_t state;

  /// Initialises the barrier; by one thread, before a fence_barriers() and a barrier of the block.
  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Arrives, and announces bytes that copies will bring.
  __device__ void expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Copies the box of a tensor of three dimensions that begins at (x, y, z) to shared memory; what lies outside
/// becomes zeros.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint32_t x, uint32_t y,
                                uint32_t z, CopyBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier))
      : "memory");
}

}  // namespace keyhole::gpu
