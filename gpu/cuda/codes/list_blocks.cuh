// How the thread blocks that choose among a KV head's lists (gpu/cuda/codes/list_choice.cuh) tell each other what they
// know. What a block tells is one object, Told, that others read or write between barriers.
//
//   ClusterOfBlocks  the blocks are a cluster (compute capability 9.0 and newer), and Told lies in their shared memory
//   GridOfBlocks     where no cluster can, as before 9.0: Told lies in the step's work space, and a barrier is a
//                    counter there. The grid is launched so that all its blocks run at once (cooperative launch): a
//                    block that waits would otherwise wait for one that has no room
#pragma once

#include "gpu/cuda/codes/cluster.cuh"
#include "gpu/cuda/codes/params.h"

namespace keyhole::gpu::codes {

template <uint32_t kCount>
class ClusterOfBlocks {
 public:
  static constexpr uint32_t kBlocks = kCount;
  static constexpr bool kTellByMemory = false;

  __device__ ClusterOfBlocks(const CodesParams& /*s*/, uint32_t /*kv_head*/) {}

  /// The two halves of a wait until all blocks have started, before which none writes to another.
  __device__ void arrive_started() const { cluster_arrive_relaxed(); }
  __device__ void wait_started() const { cluster_wait(); }
  /// The two halves of a barrier; writes before the first are visible to all blocks after the second.
  __device__ void arrive() const { cluster_arrive(); }
  __device__ void wait() const { cluster_wait(); }
  __device__ void barrier() const { cluster_barrier(); }
  /// In place of wait() at the end: no other block reads what is this one's any more.
  __device__ void leave() const { cluster_wait(); }

  /// The same variable of the Told of block `rank`.
  template <class T>
  __device__ T* in_block(T* mine, uint32_t rank) const {
    return codes::in_block(mine, rank);
  }
  /// Reads what another block may have written, or one's own.
  template <class T>
  __device__ T read(const T* at) const {
    return *at;
  }
};

template <uint32_t kCount>
class GridOfBlocks {
 public:
  static constexpr uint32_t kBlocks = kCount;
  static constexpr bool kTellByMemory = true;

  __device__ GridOfBlocks(const CodesParams& s, uint32_t kv_head)
      : arrivals_(s.lists.arrivals + kv_head), stride_(s.told_stride) {}

  // What blocks write to each other is in nobody's way before a block has started.
  __device__ void arrive_started() const {}
  __device__ void wait_started() const {}
  __device__ void arrive() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    // Every barrier adds kBlocks: the counter is a multiple of it when none is under way, behind the last step, too.
    target_ = (atomicAdd(arrivals_, 1U) / kBlocks + 1) * kBlocks;
  }
  __device__ void wait() const {
    if (threadIdx.x == 0) {
      while (static_cast<int>(*static_cast<volatile uint32_t*>(arrivals_) - target_) < 0) {
      }
      __threadfence();
    }
    __syncthreads();
  }
  __device__ void barrier() const {
    arrive();
    wait();
  }
  __device__ void leave() const {}

  template <class T>
  __device__ T* in_block(T* mine, uint32_t rank) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(mine) - blockIdx.x % kBlocks * stride_;
    return reinterpret_cast<T*>(first + rank * stride_);
  }
  /// Past the L1 cache, which does not see what other multiprocessors write.
  template <class T>
  __device__ T read(const T* at) const {
    return __ldcg(at);
  }

 private:
  uint32_t* arrivals_;
  size_t stride_;  ///< bytes from the Told of a block to that of the next
  mutable uint32_t target_ =
      0;  ///< thread 0: what the counter comes to when all blocks have arrived
};

}  // namespace keyhole::gpu::codes
