// Scores of partitions: what both kernels that choose begin with.
//
// Mean keys are int8 already; the queries become two int8 digits each (16 bits: their rounding is a thousandth of the
// keys'), and tensor cores multiply: 16 partitions by 4 heads of 2 digits at a time (m16n8k32). On CUDA cores the
// conversions alone would take as long as reading the codes.
#pragma once

#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/partitions/kernels.h"

namespace keyhole::gpu {

inline constexpr float kHuge = 1e30F;
inline constexpr uint32_t kMaxTiles = kMaxDeviceGroup / 4;  // of 4 heads
inline constexpr uint32_t kMaxSteps = kMaxDeviceHeadDim / 32;

/// The queries of a group, in a block's shared memory.
template <uint32_t Warps>
struct Scoring {
  uint32_t queries[kMaxTiles * kMaxSteps * 32 * 2];
  float of_warps[Warps][kMaxDeviceGroup];
  float scales[kMaxDeviceGroup], centers[kMaxDeviceGroup], squares[kMaxDeviceGroup];
};

// How a row of codes lies in the registers of the four lanes that hold it: 16 bytes after 16 bytes, and where the
// dimension is no multiple of 64, 4 or 8 more. Products of the matrix units sum over pairs of words, in any order
// as long as codes and queries agree.
template <uint32_t D>
struct Row {
  static constexpr uint32_t kVectors = D / 64;              // 16 bytes each
  static constexpr uint32_t kMore = D % 64 / 16;            // words
  static constexpr uint32_t kWords = 4 * kVectors + kMore;  // per lane
  static constexpr uint32_t kSteps = (kWords + 1) / 2;
  static_assert(kMore <= 2 && kSteps <= kMaxSteps);

  uint32_t words[2 * kSteps];

  __device__ void load(const int8_t* row, uint32_t lane_of_four) {
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(row + 64 * v + 16 * lane_of_four));
      words[4 * v] = x.x;
      words[4 * v + 1] = x.y;
      words[4 * v + 2] = x.z;
      words[4 * v + 3] = x.w;
    }
    const int8_t* more = row + 64 * kVectors + 4 * kMore * lane_of_four;
    if constexpr (kMore == 1) {
      words[kWords - 1] = __ldcs(reinterpret_cast<const uint32_t*>(more));
      words[kWords] = 0;
    } else if constexpr (kMore == 2) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(more));
      words[kWords - 2] = x.x;
      words[kWords - 1] = x.y;
    }
  }

  /// Word i of a whole row: the lane that holds it, and which of its words it is.
  __device__ static uint2 place(uint32_t i) {
    const uint32_t more = i - 16 * kVectors;
    if (kMore == 0 || i < 16 * kVectors) return {i % 16 / 4, i / 16 * 4 + i % 4};
    constexpr uint32_t n = kMore == 0 ? 1 : kMore;
    return {more / n, 4 * kVectors + more % n};
  }
};

/// Takes in the query of head `head` of the group: a warp's work.
template <uint32_t D, uint32_t Warps>
__device__ void encode_query(Scoring<Warps>& s, const DeviceRows& q, uint32_t q_head, uint32_t head,
                             const float* scales, const float* centers, const float* query_scales,
                             uint32_t lane) {
  constexpr uint32_t kPerLane = (D / 4 + 31) / 32;
  float x[kPerLane][4];
  float square = 0.0F;
  float center = 0.0F;
  float largest = 0.0F;
#pragma unroll
  for (uint32_t k = 0; k < kPerLane; ++k) {
    const uint32_t word = lane + 32 * k;
    if (word >= D / 4) break;
    const float4 scale = reinterpret_cast<const float4*>(scales)[word];
    const float4 mean = reinterpret_cast<const float4*>(centers)[word];
    const float4 balance = reinterpret_cast<const float4*>(query_scales)[word];
    const float by[4] = {scale.x, scale.y, scale.z, scale.w};
    const float balanced[4] = {balance.x, balance.y, balance.z, balance.w};
    const float of[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float e = load_element(q.data, q.dtype, q_head * q.head_stride + 4 * word + i);
      square += e * balanced[i] * (e * balanced[i]);
      center += e * of[i];
      x[k][i] = e * by[i];
      largest = fmaxf(largest, fabsf(x[k][i]));
    }
  }
  square = warp_sum(square);
  center = warp_sum(center);
  largest = warp_max(largest);
  // 127 * 256: the high digit stays within int8 when the low one rounds it up.
  constexpr float kMost = 32512.0F;
  const bool is_number = largest > 1e-30F && largest < kHuge;
  const float inverse = is_number ? kMost / largest : 0.0F;
  if (lane == 0) {
    s.scales[head] = is_number ? largest / kMost : largest;
    s.centers[head] = center;
    s.squares[head] = fminf(square, kHuge);
  }
  const uint32_t column = head % 4 * 2;
#pragma unroll
  for (uint32_t k = 0; k < kPerLane; ++k) {
    const uint32_t word = lane + 32 * k;
    if (word >= D / 4) break;
    uint32_t high = 0;
    uint32_t low = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const int v = __float2int_rn(x[k][i] * inverse);
      const int upper = (v + 128) >> 8;
      high |= static_cast<uint32_t>(upper & 255) << (8 * i);
      low |= static_cast<uint32_t>((v - upper * 256) & 255) << (8 * i);
    }
    const uint2 place = Row<D>::place(word);
    const uint32_t at =
        ((head / 4 * Row<D>::kSteps + place.y / 2) * 32 + column * 4 + place.x) * 2 + place.y % 2;
    s.queries[at] = high;
    s.queries[at + 8] = low;  // the next column
  }
}

struct Partition {
  float size = 1.0F, variance = 0.0F;
};

/// log2 of a partition's weight, see gpu/cuda/partitions/kernels.h.
__device__ inline float log_weight(float score, float square, Partition p,
                                   const LogitParams& logits, bool is_second) {
  float mean = fminf(fmaxf(score * logits.scale, -kHuge), kHuge);
  float slope = logits.scale;
  if (logits.softcap > 0.0F) {
    const float share = tanhf(mean / logits.softcap);
    mean = logits.softcap * share;
    slope *= 1.0F - share * share;
  }
  float expected = 0.0F;
  const float keys = __logf(p.size);
  if (is_second) {
    const float t = fminf(slope * slope * square * p.variance, kHuge);
    expected = t <= 2.0F * keys ? 0.5F * t : sqrtf(2.0F * t * keys) - keys;
  }
  return (mean + expected + keys) * kLog2E;
}

/// Scores partitions [first, first + rows) of a KV head for all heads of its group, in a block of Warps warps: logs
/// `[rows rounded up to 32, padded]` becomes log2 w, and -inf where there is no such head or row; s.of_warps[w][h] the
/// largest of warp w. A __syncthreads() has to follow.
template <uint32_t D, uint32_t Warps>
__device__ void score_rows(Scoring<Warps>& s, float* logs, const PartitionsLayer& l,
                           const DeviceRows& q, uint32_t kv_head, const PartitionsHead& head,
                           uint32_t first, uint32_t rows) {
  constexpr uint32_t kTiles = D > 128 ? 1 : 2;  // of 16 rows, that a warp has under way
  constexpr uint32_t kRows = 16 * kTiles;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const size_t base = size_t{kv_head} * l.capacity;
  const uint32_t end = (rows + 31) / 32 * 32;
  const bool is_second = head.tail != static_cast<uint32_t>(PartitionsTail::centroid);

  Row<D> codes[kTiles][2];
  Partition partitions[kTiles][2];
  const auto load = [&](uint32_t at) {
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = first + at + t * 16 + half * 8 + lane / 4;
        const size_t i = base + min(row, head.count - 1);
        codes[t][half].load(l.codes + i * D, lane % 4);
        partitions[t][half] = {l.sizes[i], l.variances[i]};
      }
    }
  };
  uint32_t at = warp * kRows;
  if (at < end) load(at);
  if (warp < l.group) {
    encode_query<D, Warps>(s, q, kv_head * l.group + warp, warp, l.scales + size_t{kv_head} * D,
                           l.centers + size_t{kv_head} * D, l.query_scales + size_t{kv_head} * D,
                           lane);
  }
  if (lane < kMaxDeviceGroup) s.of_warps[warp][lane] = kMinusInf;
  __syncthreads();
  while (at < end) {
    for (uint32_t n = 0; n < (l.padded + 3) / 4; ++n) {
      int sums[kTiles][4] = {};
#pragma unroll
      for (uint32_t step = 0; step < Row<D>::kSteps; ++step) {
        const uint2 b =
            reinterpret_cast<const uint2*>(s.queries)[(n * Row<D>::kSteps + step) * 32 + lane];
#pragma unroll
        for (uint32_t t = 0; t < kTiles; ++t) {
          multiply_add_int8(sums[t], codes[t][0].words[2 * step], codes[t][1].words[2 * step],
                            codes[t][0].words[2 * step + 1], codes[t][1].words[2 * step + 1], b);
        }
      }
      const uint32_t h = 4 * n + lane % 4;
      float largest = kMinusInf;
#pragma unroll
      for (uint32_t t = 0; t < kTiles; ++t) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t row = at + t * 16 + half * 8 + lane / 4;
          float weight = kMinusInf;
          if (h < l.group && row < rows) {
            const auto product =
                static_cast<float>(sums[t][2 * half] * 256 + sums[t][2 * half + 1]);
            weight = log_weight(product * s.scales[h] + s.centers[h], s.squares[h],
                                partitions[t][half], l.logits, is_second);
          }
          if (h < l.padded) logs[row * l.padded + h] = weight;
          largest = fmaxf(largest, weight);
        }
      }
      for (uint32_t offset = 16; offset >= 4; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, offset));
      }
      if (lane < 4) s.of_warps[warp][h] = fmaxf(largest, s.of_warps[warp][h]);
    }
    at += Warps * kRows;
    if (at < end) load(at);
  }
}

/// After score_rows() and a __syncthreads(): the largest log2 w of a head. Before the next use of s another one.
template <uint32_t Warps>
__device__ float largest_of(const Scoring<Warps>& s, uint32_t h) {
  float largest = kMinusInf;
#pragma unroll
  for (uint32_t w = 0; w < Warps; ++w) largest = fmaxf(largest, s.of_warps[w][h]);
  return largest;
}

/// Sums x over the threads of each head (threadIdx.x % padded), in threads below `padded`.
template <uint32_t Warps>
__device__ float sum_of_head(Scoring<Warps>& s, float x, uint32_t padded) {
  for (uint32_t offset = 16; offset >= padded && offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, offset);
  }
  if (threadIdx.x % 32 < padded) s.of_warps[threadIdx.x / 32][threadIdx.x % 32] = x;
  __syncthreads();
  if (threadIdx.x >= padded) return 0.0F;
  x = 0.0F;
#pragma unroll
  for (uint32_t w = 0; w < Warps; ++w) x += s.of_warps[w][threadIdx.x];
  return x;
}

}  // namespace keyhole::gpu
