// Rows of a weight matrix times one vector, two rows a warp, at the speed of memory.
//
// The number of bytes under way decides the speed. Every lane asks for 8 times 16 bytes of each row at once, so two
// blocks of 8 warps, the number that a multiprocessor shall have, ask for 128 KB; 4.8 TB/s times some 700 ns of
// latency are 26 KB for each of an H200's 132. They are asked for before the kernel in front has ended
// (tools/cuda/early_launch.cuh), so that memory does not rest between two products. Over the four products of a layer
// of Llama-3-8B that gives 4.12 TB/s, 98 % of a copy's speed; without the early start 3.93. Smaller blocks, and more
// of them side by side, are slower (3.3 to 3.9 TB/s), because early blocks of the next product then share a
// multiprocessor with those of this one.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "tools/cuda/early_launch.cuh"

namespace keyhole::tools {

/// Where numbers 4 i .. 4 i + 3 of a vector of n lie in shared memory, in quads: first the first four of every 8
/// numbers, then the other four of every 8, so that neighbouring lanes find theirs in different banks.
__device__ inline uint32_t place_of_quad(uint32_t i, uint32_t n) { return i % 2 * (n / 8) + i / 2; }

/// Adds 8 products; the weights are 16 bytes of bf16, the upper halves of fp32 numbers.
__device__ inline float dot8(const uint4& w, const float4& x, const float4& y, float sum) {
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); };
  sum = fmaf(low(w.x), x.x, sum);
  sum = fmaf(high(w.x), x.y, sum);
  sum = fmaf(low(w.y), x.z, sum);
  sum = fmaf(high(w.y), x.w, sum);
  sum = fmaf(low(w.z), y.x, sum);
  sum = fmaf(high(w.z), y.y, sum);
  sum = fmaf(low(w.w), y.z, sum);
  return fmaf(high(w.w), y.w, sum);
}

/// Two rows of a matrix in bf16, columns a multiple of 8, on their way to a warp. All lanes of the warp call its
/// functions. stride: numbers from a row to the next, likewise a multiple of 8.
class RowPair {
 public:
  __device__ RowPair(const __nv_bfloat16* base, uint2 rows, uint32_t columns)
      : RowPair(base, rows, columns, columns) {}
  __device__ RowPair(const __nv_bfloat16* base, uint2 rows, uint32_t columns, uint32_t stride)
      : row0_(reinterpret_cast<const uint4*>(base + size_t{rows.x} * stride)),
        row1_(reinterpret_cast<const uint4*>(base + size_t{rows.y} * stride)),
        pieces_(columns / 8) {
    load();
  }

  /// Adds each lane's part of the rows times the vector x in shared memory, see place_of_quad(), to `sum`.
  __device__ void multiply(const float4* x, float2& sum) {
    for (;;) {
#pragma unroll
      for (uint32_t i = 0; i < kPieces; ++i) {
        const uint32_t at = at_ + i * 32;
        if (at >= pieces_) break;
        const float4 a = x[at], b = x[pieces_ + at];
        sum.x = dot8(first_[i], a, b, sum.x);
        sum.y = dot8(second_[i], a, b, sum.y);
      }
      at_ += kPieces * 32;
      if (at_ >= pieces_) return;
      load();
    }
  }

 private:
  static constexpr uint32_t kPieces = 8;

  __device__ void load() {
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t at = at_ + i * 32;
      if (at >= pieces_) break;
      first_[i] = load_once(row0_ + at);
      second_[i] = load_once(row1_ + at);
    }
  }

  const uint4* row0_;
  const uint4* row1_;
  uint32_t pieces_;
  uint32_t at_ = threadIdx.x % 32;
  uint4 first_[kPieces], second_[kPieces];
};

}  // namespace keyhole::tools
