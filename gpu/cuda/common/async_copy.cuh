// Copies from global to shared memory that a thread does not wait for (cp.async, compute capability 8.0 and newer).
#pragma once

#include <cstdint>

namespace keyhole::gpu {

/// The address of shared memory as these instructions take it.
__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes, both addresses aligned; writes zeros where `valid` is false, and reads nothing then.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// Copies 16 bytes like copy_async(), and lets the L2 cache fetch the 128-byte line around them: for rows that are
/// read to their end.
__device__ inline void copy_async_line(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// Whether copies are told what the L2 cache is to do with their bytes: on 9.0 alone, where that was run.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr bool kCopiesTakeHints = true;
#else
inline constexpr bool kCopiesTakeHints = false;
#endif
/// What copy_async_once() tells the L2 cache: that the bytes are read once, so that they are the first to go.
__device__ inline uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// Copies 16 bytes, both addresses aligned, that nobody will read again soon. For passes over more than the L2 cache
/// holds: what others read again, their instructions too, stays there. policy: read_once().
__device__ inline void copy_async_once(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}
/// Copies 4 bytes.
__device__ inline void copy_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

/// Lets the L2 cache fetch so many bytes, which nobody waits for. Address and number are multiples of 16. Does nothing
/// on GPUs older than 9.0.
__device__ inline void prefetch_bulk(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
#endif
}

/// Makes the thread's copies since the last commit a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of the thread's groups are under way. The other threads' copies are visible after a
/// barrier.
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
/// The most groups that a wait with a number known at run time may leave under way.
inline constexpr int kMostPendingCopies = 3;
__device__ inline void wait_for_copies(int pending) {
  switch (pending) {
    case 0: wait_for_copies<0>(); break;
    case 1: wait_for_copies<1>(); break;
    case 2: wait_for_copies<2>(); break;
    default: wait_for_copies<kMostPendingCopies>(); break;
  }
}

}  // namespace keyhole::gpu
