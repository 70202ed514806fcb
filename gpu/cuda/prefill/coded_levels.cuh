// Codes as 16-bit numbers, and words of shared memory: what both passes of a turn over codes (coded_attend.cuh,
// coded_general.cuh) make tiles of keys and values with.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace keyhole::gpu::coded {

/// Which tile of rows comes i-th: of all, or of the blocks that were chosen, each of so many tiles. A kernel that was
/// launched ahead may have begun before they are written: they are no constants for it, which __ldg() is for.
template <uint32_t kTilesOfBlock, bool kIsChosen>
__device__ inline uint32_t tile_of(const uint32_t* chosen, uint32_t i) {
  if constexpr (!kIsChosen) return i;
  return chosen[i / kTilesOfBlock] * kTilesOfBlock + i % kTilesOfBlock;
}

constexpr uint32_t k1024 = 0x64006400U;  ///< in both halves

/// Two neighbouring levels as numbers: 1024 + 2 u of a code u becomes 2 u + 1 - 2^bits.
template <int kBits>
__device__ inline __half2 levels_of(uint32_t x) {
  const __half2 offset = __float2half2_rn(1024.0F + static_cast<float>((1 << kBits) - 1));
  return __hsub2(*reinterpret_cast<const __half2*>(&x), offset);
}
/// A word moved so that the code at bit `at` of each byte or half lies one bit above its beginning. at: of `at` - 1 the
/// last five bits.
__device__ inline uint32_t doubled_code(uint32_t word, uint32_t at) {
  return __funnelshift_r(word, word, at - 1);
}
/// (x & mask) | more in one instruction, which has room for one constant.
template <uint32_t mask>
__device__ inline uint32_t masked_with(uint32_t x, uint32_t more) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "n"(mask), "r"(more));
  return y;
}
/// The same number, of which the compiler does not know where it is from: it keeps it, and does not make it again.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline uint32_t word_of(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ inline __half2 half2_of(uint32_t x) { return *reinterpret_cast<const __half2*>(&x); }
// Loads from an address of shared memory, in the order of the program. A pointer to a member of a structure there would
// be one to any memory, from which loads take longer.
__device__ inline uint16_t load_half(uint32_t at) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
  return x;
}
__device__ inline uint32_t load_one(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
__device__ inline uint2 load_two(uint32_t at) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}
// Stores to an address of shared memory.
__device__ inline void store_one(uint32_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x));
}
__device__ inline void store_two(uint32_t at, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y));
}

}  // namespace keyhole::gpu::coded
