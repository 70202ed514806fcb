// A row of a query, a key or a value as a warp has it: which components are whose, its rotation, and its way to shared
// memory.
#pragma once

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/rotation.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

/// Number of quads of components that a lane has of a row that a warp works on: quad u is components 128 u + 4 lane
/// .. + 3. It is one up to a dimension of 128, where some lanes may have none.
template <int kDim>
constexpr int kLaneQuads = (kDim + 127) / 128;
/// Number of components of a lane.
template <int kDim>
constexpr int kLaneParts = 4 * kLaneQuads<kDim>;

/// Rotates a row of which each lane of a warp has its quads, or back. `row` holds the same in shared memory, for
/// dimensions that are no power of 2, whose passes overlap.
template <int kDim>
__device__ inline void rotate_quads(float (&x)[kLaneParts<kDim>], float* row, int lane, bool back) {
  if constexpr ((kDim & (kDim - 1)) != 0) {
    static_assert(kDim <= 128, "a lane has one quad");
    if (4 * lane < kDim) *reinterpret_cast<float4*>(row + 4 * lane) = {x[0], x[1], x[2], x[3]};
    __syncwarp();
    rotate_in_shared(row, kDim, back);
    if (4 * lane < kDim) {
      const float4 y = *reinterpret_cast<const float4*>(row + 4 * lane);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
  } else {
    constexpr int kParts = kLaneParts<kDim>;
    float signs[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      signs[i] = code_sign(0, static_cast<uint32_t>(i / 4 * 128 + 4 * lane + i % 4));
      if (!back) x[i] *= signs[i];
    }
#pragma unroll
    for (int i = 0; i < kParts; i += 4) {
      const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
      const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
      x[i] = a + c, x[i + 1] = b + d, x[i + 2] = a - c, x[i + 3] = b - d;
    }
#pragma unroll
    for (int step = 1; step < kDim / kParts; step *= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float other = __shfl_xor_sync(kWholeWarp, x[i], step);
        x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
      }
    }
#pragma unroll
    for (int step = 4; step < kParts; step *= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if ((i & step) != 0) continue;
        const float a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
    }
    const float norm = rsqrtf(static_cast<float>(kDim));
#pragma unroll
    for (int i = 0; i < kParts; ++i) x[i] *= back ? norm * signs[i] : norm;
  }
}

/// Writes a lane's quads of a row, times `unit`, to shared memory.
template <int kDim>
__device__ inline void store_quads(float* row, int lane, const float (&x)[kLaneParts<kDim>],
                                   float unit) {
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    *reinterpret_cast<float4*>(row + 128 * u + 4 * lane) = {
        x[4 * u] * unit, x[4 * u + 1] * unit, x[4 * u + 2] * unit, x[4 * u + 3] * unit};
  }
}
__device__ inline void convert_quad(const RawQuad& raw, DType dtype, float* x) {
  float y[4];
  convert(raw, dtype, y);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = y[i];
}

}  // namespace keyhole::gpu::codes
