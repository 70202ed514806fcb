// The heaviest rows: read from where they lie, attended exactly and by their codes.
#pragma once

#include "gpu/cuda/codes/host_rows.cuh"
#include "gpu/cuda/codes/int8_rows.cuh"
#include "gpu/cuda/codes/pair_places.cuh"
#include "gpu/cuda/codes/queries.cuh"

namespace keyhole::gpu::codes {

/// Decodes components 4 quad .. 4 quad + 3 of the value of a pair's row from its code.
template <int kDim, int kBits>
__device__ inline float4 coded_value(const PairPlace<kDim, kBits>& pair, uint32_t row, int quad) {
  constexpr CodeShape kShape{kDim, kBits, kBits};
  const float factor = __half2float(reinterpret_cast<const __half*>(pair.factors)[2 * row + 1]);
  const auto* means = reinterpret_cast<const __half2*>(pair.value_mean) + 2 * quad;
  const float2 low = __half22float2(means[0]), high = __half22float2(means[1]);
  float x[4] = {low.x, low.y, high.x, high.y};
  const auto* words = reinterpret_cast<const uint32_t*>(pair.values) +
                      row / kCodeTile * kCodeLanes * kShape.value_words();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const CodePlace place =
        kShape.value_place(row % kCodeTile, static_cast<uint32_t>(4 * quad + i));
    const auto code = static_cast<int>(words[place.word] >> place.shift & ((1U << kBits) - 1));
    x[i] = fmaf(factor, static_cast<float>(2 * code - ((1 << kBits) - 1)), x[i]);
  }
  return {x[0], x[1], x[2], x[3]};
}

/// Shared memory of kRows rows, one for each warp: values and logits (base 2), both exact and by code.
template <int kDim, int kHeads, uint32_t kRows>
struct RowShared {
  alignas(16) float exact_values[kRows][kDim];
  alignas(16) float coded_values[kRows][kDim];
  float exact_logits[kRows][kHeads];
  float coded_logits[kRows][kHeads];
};

/// A row as it lies in memory: a lane's quads of K and of V; zeros in lanes beyond the head dimension.
template <int kDim>
struct RawRow {
  static constexpr uint32_t kQuads = kLaneQuads<kDim>;
  RawQuad key[kQuads] = {}, value[kQuads] = {};

  /// Loads row `row`. number: its place among the chosen rows.
  __device__ void load(const CodesParams& s, uint32_t kv_head, uint32_t row, uint32_t number) {
    const uint32_t lane = threadIdx.x % 32;
    const size_t at = kv_head * s.kv_head_stride + row * s.row_stride;
    const std::byte* k = s.keys + at;
    const std::byte* v = s.values + at;
    if (s.host_rows.requests != nullptr) {
      k = host_row(s, kv_head, number);
      v = k + s.host_rows.row_bytes;
    }
    if (4 * lane < kDim && s.dtype == DType::i8) {
      const uint16_t* scales =
          s.row_scales + (size_t{row / kCodeBlock} * s.kv_heads + kv_head) * 2 * kDim;
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        key[u] = load_int8(k, scales, 32 * u + lane);
        value[u] = load_int8(v, scales + kDim, 32 * u + lane);
      }
    } else if (4 * lane < kDim) {
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        key[u] = load_aligned(k, s.dtype, size_t(4) * (32 * u + lane));
        value[u] = load_aligned(v, s.dtype, size_t(4) * (32 * u + lane));
      }
    }
  }
};

/// Leaves a row in place `slot` of `rows`, by a warp: its values and the heads' logits, both exact and by code.
/// number: its number among the chosen; place, row: its place (gpu/cuda/codes/pair_places.cuh) and number among all;
/// by_table: reads_by_table(); q: queries as they came; coded: its logits by its code, perhaps in another
/// block's memory.
template <int kDim, int kBits, int kHeadTiles, uint32_t kRows>
__device__ inline void attend_row(const CodesParams& s, uint32_t kv_head, uint32_t number,
                                  uint32_t place, uint32_t row, bool by_table,
                                  const RawRow<kDim>& raw, const float (&q)[4 * kHeadTiles][kDim],
                                  const float* coded, RowShared<kDim, 4 * kHeadTiles, kRows>& rows,
                                  uint32_t slot) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool inside = 4 * lane < kDim;
  // Does everything else that the row needs while its bytes are on their way.
  if (lane == 0 && s.chosen != nullptr) s.chosen[kv_head * s.exact_rows + number] = row;
  if (inside) {
    const PairPlace<kDim, kBits> pair(s, kv_head, place / kPairRows, 4 * kHeadTiles, by_table);
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      *reinterpret_cast<float4*>(&rows.coded_values[slot][128 * u + 4 * lane]) =
          coded_value<kDim, kBits>(pair, place % kPairRows, 32 * u + lane);
    }
  }
  if (lane < 4 * kHeadTiles) rows.coded_logits[slot][lane] = coded[lane];
  float k[kLaneQuads<kDim>][4];
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    float v[4];
    convert_row(raw.key[u], s.dtype, k[u]);
    convert_row(raw.value[u], s.dtype, v);
    if (inside) {
      *reinterpret_cast<float4*>(&rows.exact_values[slot][128 * u + 4 * lane]) = {v[0], v[1], v[2],
                                                                                  v[3]};
    }
  }
  const float cap = s.logits.softcap * kLog2E;
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    float dots[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int u = 0; u < kLaneQuads<kDim>; ++u) {
        if (!inside) continue;
        const float4 x = *reinterpret_cast<const float4*>(&q[4 * t + i][128 * u + 4 * lane]);
        const float last = u == 0 ? x.w * k[u][3] : fmaf(x.w, k[u][3], dots[i]);
        dots[i] = fmaf(x.x, k[u][0], fmaf(x.y, k[u][1], fmaf(x.z, k[u][2], last)));
      }
    }
    const float dot = sum_of_own_head(dots, lane);
    if (lane < 4) {
      float slope;
      rows.exact_logits[slot][4 * t + lane] = cap == 0.0F ? dot : capped(dot, cap, slope);
    }
  }
}

/// Four components of a head's sums over rows, both exact and by code. Weights by code are 2^(logit - base), exact
/// ones 2^(logit - exact_max).
struct RowSums {
  float4 coded = {0.0F, 0.0F, 0.0F, 0.0F}, exact = {0.0F, 0.0F, 0.0F, 0.0F};
  float coded_sum = 0.0F, exact_sum = 0.0F;
  float exact_max = kMinusInf;

  /// Adds components at .. at+3 of head h for the first `count` rows.
  template <int kDim, int kHeads, uint32_t kRows>
  __device__ void add(const RowShared<kDim, kHeads, kRows>& rows, uint32_t count, uint32_t h,
                      uint32_t at, float base) {
    const float before = exact_max;
#pragma unroll 1
    for (uint32_t r = 0; r < count; ++r) exact_max = fmaxf(exact_max, rows.exact_logits[r][h]);
    const float exact_base = finite_base(exact_max);
    const float keep = exp2_fast(before - exact_base);
    exact.x *= keep, exact.y *= keep, exact.z *= keep, exact.w *= keep;
    exact_sum *= keep;
#pragma unroll 1
    for (uint32_t r = 0; r < count; ++r) {
      const float a = exp2_fast(rows.coded_logits[r][h] - base);
      const float b = exp2_fast(rows.exact_logits[r][h] - exact_base);
      const float4 x = *reinterpret_cast<const float4*>(&rows.coded_values[r][at]);
      const float4 y = *reinterpret_cast<const float4*>(&rows.exact_values[r][at]);
      coded_sum += a;
      exact_sum += b;
      coded.x = fmaf(a, x.x, coded.x), coded.y = fmaf(a, x.y, coded.y);
      coded.z = fmaf(a, x.z, coded.z), coded.w = fmaf(a, x.w, coded.w);
      exact.x = fmaf(b, y.x, exact.x), exact.y = fmaf(b, y.y, exact.y);
      exact.z = fmaf(b, y.z, exact.z), exact.w = fmaf(b, y.w, exact.w);
    }
  }
};

}  // namespace keyhole::gpu::codes
