// The logits of a tile of 16 rows by their codes. Both kernels of a step run the same instructions, so that both see
// the same bits.
//
//   scores   <q, u> in integers: keys' codes where they lie in their bytes (a mask, no shift) times q in two 8-bit
//            parts (gpu/cuda/codes/queries.cuh), which are two columns of one product m16n8k32: 4 heads fill its 8
//   logits   scale * log2(e) * (f <q, level> + <q, mean>) - noise, in fp32: a lane has 2 rows of one head. The noise
//            is taken up to kMostNoiseBias alone, as on the host
#pragma once

#include <cuda_fp16.h>

#include "gpu/cuda/codes/code_math.cuh"
#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/common/tensor_core.cuh"

namespace keyhole::gpu::codes {

/// The codes of step `step` of a tile's keys, rows lane/4 + 8 r, as u times 2^key_shift(step).
template <int kBits, int kWords>
__device__ inline uint32_t key_register(const uint32_t (&words)[kWords], int step, int r) {
  constexpr int kPer = 8 / kBits;
  constexpr uint32_t kMask = kBits == 2 ? 0x03030303U : 0x0F0F0F0FU;
  if (step / kPer * 2 + r >= kWords) return 0;  // components beyond a head dimension of 80
  return words[step / kPer * 2 + r] & (kMask << (step % kPer * kBits));
}

template <int kWords>
__device__ inline void load_words(const std::byte* tile, int lane, uint32_t (&words)[kWords]) {
  const auto* from = reinterpret_cast<const uint32_t*>(tile) + lane * kWords;
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from + i));
      words[i] = x.x;
      words[i + 1] = x.y;
      words[i + 2] = x.z;
      words[i + 3] = x.w;
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from + i));
      words[i] = x.x;
      words[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcs(from + i);
  }
}

/// The part of a tile of 16 rows that a lane holds.
template <int kDim, int kBits>
struct CodeTile {
  static constexpr CodeShape kShape{kDim, kBits, kBits};
  static constexpr int kKeyWords = static_cast<int>(kShape.key_words());
  static constexpr int kValueWords = static_cast<int>(kShape.value_words());
  uint32_t keys[kKeyWords];
  uint32_t values[kValueWords];
  __half2 factors[2];  ///< (f, g) of rows lane/4 and lane/4 + 8

  /// Loads keys and factors alone, of a tile of those that begin at `codes` and `their_factors`.
  __device__ void load_keys(const std::byte* codes, const std::byte* their_factors, int tile,
                            int lane) {
    load_words<kKeyWords>(codes + size_t{kCodeLanes} * kKeyWords * 4 * tile, lane, keys);
    const auto* from = reinterpret_cast<const __half2*>(their_factors) + kCodeTile * tile;
    factors[0] = from[lane / 4];
    factors[1] = from[lane / 4 + 8];
  }
};

/// <row of head lane % 4, mean>, in all lanes; rows already have the logits' scale.
template <int kDim>
__device__ inline float mean_logit(const float (*rows)[kDim], const __half* mean, int lane) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kDim; i += 64) {
    const int j = i + 2 * lane;
    if (kDim % 64 != 0 && j >= kDim) break;
    const float2 m = __half22float2(*reinterpret_cast<const __half2*>(mean + j));
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float2 q = *reinterpret_cast<const float2*>(&rows[h][j]);
      sums[h] = fmaf(q.x, m.x, fmaf(q.y, m.y, sums[h]));
    }
  }
  return sum_of_own_head(sums, lane);
}

/// Products <q, u> of rows lane/4 and lane/4 + 8 of every tile, both parts of them, with heads 4 t + lane % 4. q: the
/// b registers. Several tiles go side by side, so that their products wait for results together.
template <int kDim, int kBits, int kHeadTiles, class Tile, int kTiles>
__device__ inline void tile_scores(const Tile (&tiles)[kTiles],
                                   const uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                   int (&scores)[kTiles][kHeadTiles][4]) {
#pragma unroll
  for (int step = 0; step < (kDim + 31) / 32; ++step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[r] = key_register<kBits>(tiles[i].keys, 2 * step + r / 2, r % 2);
      }
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        multiply_add_bytes(scores[i][t], a, q[t][step][0], q[t][step][1]);
      }
    }
  }
}

/// The number whose product with f is added to the logit of the block's mean. row: 0 or 1 of the lane's two.
__device__ inline float score_of_row(const int (&scores)[4], int row, const HeadConstants& head) {
  const int whole = scores[2 * row] * 128 + scores[2 * row + 1];
  return fmaf(static_cast<float>(whole), head.slope, head.offset);
}

/// Logits in base 2 of rows lane/4 (x) and lane/4 + 8 (y) of every tile, for head 4 t + lane % 4. middle: the logits
/// of the block's mean key; cap: log2(e) times the soft-cap.
template <int kHeadTiles, class Tile, int kTiles>
__device__ inline void weigh_scores(const Tile (&tiles)[kTiles],
                                    const int (&scores)[kTiles][kHeadTiles][4],
                                    const HeadConstants (&head)[kHeadTiles], float noise, float cap,
                                    const float (&middle)[kHeadTiles],
                                    float2 (&logits)[kTiles][kHeadTiles]) {
  constexpr float kMostBias = kMostNoiseBias * kLog2E;
  const auto product = [&](int i, int t, int row) {
    return score_of_row(scores[i][t], row, head[t]);
  };
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float f0 = __low2float(tiles[i].factors[0]), f1 = __low2float(tiles[i].factors[1]);
    const float square0 = f0 * f0, square1 = f1 * f1;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const float n = head[t].noise * noise, least = middle[t] - kMostBias;
      logits[i][t].x = fmaf(f0, product(i, t, 0), fmaxf(fmaf(-n, square0, middle[t]), least));
      logits[i][t].y = fmaf(f1, product(i, t, 1), fmaxf(fmaf(-n, square1, middle[t]), least));
    }
  }
  if (cap == 0.0F) return;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float f0 = __low2float(tiles[i].factors[0]), f1 = __low2float(tiles[i].factors[1]);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const float n = head[t].noise * noise;
      float slope;
      const float l0 = capped(fmaf(f0, product(i, t, 0), middle[t]), cap, slope);
      logits[i][t].x = l0 - fminf(n * slope * slope * (f0 * f0), kMostBias);
      const float l1 = capped(fmaf(f1, product(i, t, 1), middle[t]), cap, slope);
      logits[i][t].y = l1 - fminf(n * slope * slope * (f1 * f1), kMostBias);
    }
  }
}

/// Computes tile_scores() and weigh_scores() at once.
template <int kDim, int kBits, int kHeadTiles, class Tile, int kTiles>
__device__ inline void tile_logits(const Tile (&tiles)[kTiles],
                                   const uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                   const HeadConstants (&head)[kHeadTiles], float noise, float cap,
                                   const float (&middle)[kHeadTiles],
                                   float2 (&logits)[kTiles][kHeadTiles]) {
  int scores[kTiles][kHeadTiles][4] = {};
  tile_scores<kDim, kBits, kHeadTiles>(tiles, q, scores);
  weigh_scores<kHeadTiles>(tiles, scores, head, noise, cap, middle, logits);
}

}  // namespace keyhole::gpu::codes
