// How rows become codes on the device, by warps: for blocks of consecutive rows (encode.cu) and for lists of near rows
// (encode_lists.cu). Both are compiled without contraction to fused multiply-adds, so that they make the bits of the
// host (index/scan/code_rows.h).
#pragma once

#include <cuda_fp16.h>

#include "cpu/code_layout.h"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

constexpr float kLargestHalf = 65504.0F;

/// fp16 as in files: numbers beyond `most` become that, not infinity, and `fits` becomes false.
__device__ inline __half to_half(float x, bool& fits, float most = kLargestHalf) {
  if (!(fabsf(x) <= most)) {
    fits = false;
    x = signbit(x) ? -most : most;
  }
  return __float2half_rn(x);
}

/// Bounds x. Larger numbers after the balance are beyond fp16 by far; the square of a row of bounded ones is finite.
__device__ inline float bounded(float x) {
  constexpr float kLargest = 1e15F;
  return x < -kLargest ? -kLargest : kLargest < x ? kLargest : x;
}

/// One warp rotates a row in shared memory.
__device__ inline void rotate_row(float* row, uint32_t dim, uint32_t lane) {
  for (uint32_t i = 0; i < hadamard_passes(dim); ++i) {
    const HadamardPass pass = hadamard_pass(dim, i);
    float* x = row + pass.begin;
    for (uint32_t j = lane; j < pass.size; j += 32) x[j] *= code_sign(i, j);
    __syncwarp();
    for (uint32_t step = 1; step < pass.size; step *= 2) {
      for (uint32_t p = lane; p < pass.size / 2; p += 32) {
        const uint32_t at = 2 * p - (p & (step - 1));
        const float a = x[at], b = x[at + step];
        x[at] = a + b;
        x[at + step] = a - b;
      }
      __syncwarp();
    }
    const float norm = 1.0F / sqrtf(static_cast<float>(pass.size));
    for (uint32_t j = lane; j < pass.size; j += 32) x[j] *= norm;
    __syncwarp();
  }
}

/// The result of encoding a row of residuals.
struct CodedRow {
  float square;      ///< <r, r>
  float product;     ///< <r, level>
  float all_levels;  ///< <level, level>
};

/// One warp: the codes of a row of residuals, of which a lane has every 32nd component, to `codes`, a byte each.
template <uint32_t kMostOfLane>
__device__ inline CodedRow code_row(const float (&x)[kMostOfLane], uint32_t dim, uint32_t bits,
                                    uint32_t lane, uint8_t* codes) {
  CodedRow out;
  float sum = 0.0F;
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    if (lane + 32 * i < dim) sum += x[i] * x[i];
  }
  out.square = warp_sum(sum);
  const float step = code_step(bits) * sqrtf(out.square / static_cast<float>(dim));
  const float inverse = step > 0.0F ? 0.5F / step : 0.0F;
  const auto half = static_cast<float>(1U << (bits - 1));
  const int most = (1 << bits) - 1;
  const auto top = static_cast<float>(most);
  int levels = 0;
  sum = 0.0F;
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    if (lane + 32 * i >= dim) continue;
    const float place = floorf(x[i] * inverse + half);
    const int code = static_cast<int>(place < 0.0F ? 0.0F : top < place ? top : place);
    codes[lane + 32 * i] = static_cast<uint8_t>(code);
    const int level = 2 * code - most;
    levels += level * level;
    sum += x[i] * static_cast<float>(level);
  }
  out.product = warp_sum(sum);
  out.all_levels = static_cast<float>(__reduce_add_sync(kWholeWarp, levels));
  return out;
}

/// Packs the key codes of `tiles` tiles, a byte each in `codes` `[16 tiles, pitch]`, for the tensor cores, by `threads`
/// threads.
__device__ inline void pack_keys(const CodeShape& shape, const std::byte* codes, uint32_t pitch,
                                 uint32_t tiles, uint32_t threads, uint32_t* out) {
  const uint32_t words = shape.key_words();
  const uint32_t per_word = 8 / shape.key_bits;
  for (uint32_t i = threadIdx.x; i < tiles * kCodeLanes * words; i += threads) {
    const uint32_t lane = i / words % kCodeLanes;
    const uint32_t tile = i / words / kCodeLanes;
    const uint32_t row = tile * kCodeTile + lane / 4 + i % words % 2 * 8;
    uint32_t word = 0;
    for (uint32_t s = 0; s < per_word; ++s) {
      const uint32_t component = (i % words / 2 * per_word + s) * 16 + lane % 4 * 4;
      if (component >= shape.dim) break;
      word |= *reinterpret_cast<const uint32_t*>(codes + row * pitch + component)
              << (s * shape.key_bits);
    }
    out[i] = word;
  }
}

/// The same of values.
__device__ inline void pack_values(const CodeShape& shape, const std::byte* codes, uint32_t pitch,
                                   uint32_t tiles, uint32_t threads, uint32_t* out) {
  const uint32_t words = shape.value_words();
  const uint32_t per_word = 16 / shape.value_bits;
  for (uint32_t i = threadIdx.x; i < tiles * kCodeLanes * words; i += threads) {
    const uint32_t lane = i / words % kCodeLanes;
    const uint32_t tile = i / words / kCodeLanes;
    uint32_t word = 0;
    for (uint32_t s = 0; s < per_word; ++s) {
      const uint32_t reg = i % words * per_word + s;
      if (reg >= shape.dim / 4) break;
      const uint32_t component = reg / 4 * 16 + lane / 4 + reg % 2 * 8;
      const uint32_t row = tile * kCodeTile + lane % 4 * 2 + reg % 4 / 2 * 8;
      const std::byte* from = codes + row * pitch + component;
      word |= (static_cast<uint32_t>(from[0]) | static_cast<uint32_t>(from[pitch]) << 16U)
              << (s * shape.value_bits);
    }
    out[i] = word;
  }
}

}  // namespace keyhole::gpu::codes
