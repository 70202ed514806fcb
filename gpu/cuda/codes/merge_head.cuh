// Merges the state of a head from its parts: the codes without the rows that were read exactly, those rows, resident
// tokens, and the learned sink. NaN stays NaN, in lse, too: only a set whose sum of weights is 0 is empty.
#pragma once

#include "gpu/cuda/codes/queries.cuh"

namespace keyhole::gpu::codes {

/// The resident state of a head that a warp merges: a lane's quads; empty where there is none.
template <int kDim>
struct ResidentHead {
  float4 o[kLaneQuads<kDim>] = {};
  float lse = kMinusInf;

  __device__ void load(const CodesParams& s, size_t head) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
      if (4 * lane >= kDim) continue;
      o[u] = reinterpret_cast<const float4*>(s.resident_o + head * kDim)[32 * u + lane];
    }
    lse = s.resident_lse[head];
  }
};

/// Sums of weights, and of weights times values, over a set of rows. Weights are 2^(logit - top); a set without rows
/// has top -inf. o: a lane's quads.
template <int kDim>
struct PartOfHead {
  float top, total;
  float o[kLaneParts<kDim>];
};

/// Writes the state of number `h` of a KV head's group, by a warp. codes: o is rotated, values are divided by
/// value_scale; row: `[kDim]` in shared memory, which is overwritten.
template <int kDim>
__device__ inline void merge_head(const CodesParams& s, uint32_t kv_head, uint32_t h,
                                  PartOfHead<kDim> codes, const PartOfHead<kDim>& exact,
                                  float value_scale, const ResidentHead<kDim>& resident,
                                  float* row) {
  constexpr int kParts = kLaneParts<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  rotate_quads<kDim>(codes.o, row, lane, true);
  const float base = finite_base(fmaxf(codes.top, exact.top));
  const float keep = exp2_fast(codes.top - base), weight = exp2_fast(exact.top - base);
  const float unit = keep * value_scale;
  // If the rows that were read were all of them, what is left of the codes' weights is rounding.
  const float total = fmaf(weight, exact.total, (codes.total < 0.0F ? 0.0F : codes.total) * keep);
  const float inverse = total == 0.0F ? 0.0F : __fdividef(1.0F, total);
  float lse = total == 0.0F ? kMinusInf : (base + log2_fast(total)) * kLn2;
  float o[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) o[i] = fmaf(weight, exact.o[i], codes.o[i] * unit) * inverse;
  if (s.resident_o != nullptr) {
    const float natural = finite_base(fmaxf(lse, resident.lse));
    const float a = weight_fast(lse, natural), b = weight_fast(resident.lse, natural);
    const float sum = a + b;
    const float part = sum == 0.0F ? 0.0F : __fdividef(1.0F, sum);
    const float to_a = a * part, to_b = b * part;
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      const float4 x = resident.o[u];
      float* quad = o + 4 * u;
      quad[0] = fmaf(to_a, quad[0], to_b * x.x), quad[1] = fmaf(to_a, quad[1], to_b * x.y);
      quad[2] = fmaf(to_a, quad[2], to_b * x.z), quad[3] = fmaf(to_a, quad[3], to_b * x.w);
    }
    lse = sum == 0.0F ? kMinusInf : natural + log_fast(sum);
  }
  const QueryHead head = query_head(s, kv_head, h);
  if (s.sinks != nullptr) {
    // Merges with the learned sink, the state (0, sink).
    const float sink = s.sinks[head.head];
    const float natural = finite_base(fmaxf(lse, sink));
    const float a = weight_fast(lse, natural);
    const float sum = a + weight_fast(sink, natural);
    const float keep_o = sum == 0.0F ? 0.0F : __fdividef(a, sum);
#pragma unroll
    for (int i = 0; i < kParts; ++i) o[i] *= keep_o;
    lse = sum == 0.0F ? kMinusInf : natural + log_fast(sum);
  }
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    if (4 * lane >= kDim) continue;
    const float quad[4] = {o[4 * u], o[4 * u + 1], o[4 * u + 2], o[4 * u + 3]};
    const size_t at = row_at(s.out, head) + size_t(4) * lane + 128 * u;
    store_elements(s.out.data, s.out.dtype, at, quad);
  }
  if (s.lse != nullptr && lane == 0) {
    s.lse[head.token * (s.kv_heads * s.group / s.tokens) + head.head] = lse;
  }
}

}  // namespace keyhole::gpu::codes
