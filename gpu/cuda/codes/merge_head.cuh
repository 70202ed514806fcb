// A head's state made of what its parts left: the codes without the rows that were read exactly, those rows, and resident
// tokens.
#pragma once

#include "gpu/cuda/codes/queries.cuh"

namespace keyhole::gpu::codes {

/// The resident state of a head that a warp merges, components 4 lane .. 4 lane + 3; empty where there is none.
struct ResidentHead {
  float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
  float lse = kMinusInf;

  template <int kDim>
  __device__ void load(const CodesParams& s, size_t head) {
    const uint32_t lane = threadIdx.x % 32;
    if (4 * lane < kDim) o = reinterpret_cast<const float4*>(s.resident_o + head * kDim)[lane];
    lse = s.resident_lse[head];
  }
};

/// Sums of weights, and of weights times values, of a set of rows; weights are 2^(logit - top), so a set without rows has
/// top -inf. o: components 4 lane .. 4 lane + 3.
struct PartOfHead {
  float top, total;
  float o[4];
};

/// Writes the state of query head `head`, by a warp. codes: o is rotated, values are divided by value_scale; row: `[kDim]`
/// in shared memory, which is overwritten.
template <int kDim>
__device__ inline void merge_head(const CodesParams& s, size_t head, PartOfHead codes,
                                  const PartOfHead& exact, float value_scale,
                                  const ResidentHead& resident, float* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  rotate_quads<kDim>(codes.o, row, lane, true);
  const float base = finite_base(fmaxf(codes.top, exact.top));
  const float keep = exp2_fast(codes.top - base), weight = exp2_fast(exact.top - base);
  const float unit = keep * value_scale;
  // What is left of the codes' weights where the rows were all of them is rounding.
  const float total = fmaf(weight, exact.total, fmaxf(codes.total, 0.0F) * keep);
  const float inverse = total > 0.0F ? __fdividef(1.0F, total) : 0.0F;
  float lse = total > 0.0F ? (base + log2f(total)) * kLn2 : kMinusInf;
  float o[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) o[i] = fmaf(weight, exact.o[i], codes.o[i] * unit) * inverse;
  if (s.resident_o != nullptr) {
    const float natural = finite_base(fmaxf(lse, resident.lse));
    const float a = natural_weight(lse, natural), b = natural_weight(resident.lse, natural);
    const float sum = a + b;
    const float part = sum > 0.0F ? __fdividef(1.0F, sum) : 0.0F;
    const float to_a = a * part, to_b = b * part;
    o[0] = fmaf(to_a, o[0], to_b * resident.o.x), o[1] = fmaf(to_a, o[1], to_b * resident.o.y);
    o[2] = fmaf(to_a, o[2], to_b * resident.o.z), o[3] = fmaf(to_a, o[3], to_b * resident.o.w);
    lse = sum > 0.0F ? natural + logf(sum) : kMinusInf;
  }
  if (4 * lane < kDim) {
    store_elements(s.out.data, s.out.dtype, head * s.out.head_stride + size_t(4) * lane, o);
  }
  if (s.lse != nullptr && lane == 0) s.lse[head] = lse;
}

}  // namespace keyhole::gpu::codes
