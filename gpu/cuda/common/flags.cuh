// Flags and counters that blocks of a grid share with each other, or with the host in pinned memory.
//
// Memory order. A release makes everything that the thread wrote before it visible to a thread that acquires the flag;
// after a __syncthreads() that covers the whole block's writes. Scope: the device for blocks among themselves, the
// system for the host, whose side is std::atomic_ref with the same orders (gpu/cuda/common/waiting.h). On sm_90 the
// functions compile to the instructions of hand-written ld.acquire, st.release and atom.acq_rel, with generic addresses
// in place of global ones.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace keyhole::gpu {

/// Tells the host a value: release, system scope. Costs a fence over the bus, about a microsecond.
__device__ inline void store_release_system(uint32_t* flag, uint32_t value) {
  cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*flag).store(value,
                                                                     cuda::memory_order_release);
}

/// Tells the host one word that needs nothing else to be visible: relaxed, system scope.
__device__ inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*word).store(value,
                                                                     cuda::memory_order_relaxed);
}

/// Reads 8 aligned bytes that the host writes (two 32-bit flags, say): acquire, system scope.
__device__ inline uint64_t load_acquire_system(const void* words) {
  auto* word = const_cast<uint64_t*>(static_cast<const uint64_t*>(words));
  return cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*word).load(
      cuda::memory_order_acquire);
}

/// Counts this block in, by one thread after a __syncthreads(), and returns the count before. Acquire and release,
/// device scope: what the block wrote before is visible to the block that sees the count, and, after another
/// __syncthreads(), what the counted blocks wrote is visible to this one.
__device__ inline uint32_t arrive(uint32_t* counter) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*counter).fetch_add(
      1, cuda::memory_order_acq_rel);
}

/// Sets bits, with the order and scope of arrive(), and returns the bits before.
__device__ inline uint32_t arrive_with(uint32_t* word, uint32_t bits) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*word).fetch_or(
      bits, cuda::memory_order_acq_rel);
}

/// Nanoseconds of a clock that all multiprocessors share. It ticks in steps of up to a microsecond.
__device__ inline uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace keyhole::gpu
