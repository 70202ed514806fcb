// Tiles of codes as tensor cores of compute capability 8.0 and newer read keys and values: registers of products of
// 16 x 8 (gpu/cuda/common/tensor_core.cuh), which a warp makes of words of codes and all warps read from shared memory
// as they lie there. Lanes have in words of codes what they have in registers (cpu/code_layout.h): nothing is
// transposed, and a lane reads 16 bytes beside those of the lane before.
//
//   keys    a product takes 16 components of 8 rows. Which of them it takes for its first is all one as long as queries
//           come in the same order: a lane has four neighbouring ones, 4 (lane % 4) .., of row lane / 4
//   values  it takes 16 rows of 8 components: a lane has those of component lane / 4
//
// A UNIT is 16 components of a tile of codes, of keys or of values: 16 bytes of a lane, for two products.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"
#include "gpu/cuda/prefill/coded_kernels.h"
#include "gpu/cuda/prefill/coded_levels.cuh"

namespace keyhole::gpu::coded {

template <int kDim, int kBits>
struct FragmentShape {
  static constexpr CodeShape kCode{kDim, kBits, kBits};
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kQueries = static_cast<int>(kCodedQueries);
  static_assert(kQueries == 16 * kWarps);
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;  ///< rows of a tile
  static constexpr int kCodeTiles = kKeys / static_cast<int>(kCodeTile);
  static constexpr uint32_t kTilesOfBlock = kCodeBlock / kKeys;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kWarpsOfTile =
      kWarps / kCodeTiles;  ///< that divide the units of a tile of codes
  static constexpr int kUnits = (kSteps + kWarpsOfTile - 1) / kWarpsOfTile;
  static constexpr int kKeyWords = static_cast<int>(kCode.key_words());
  static constexpr int kValueWords = static_cast<int>(kCode.value_words());
  /// Up to 128 components registers have room for the queries, too, and shared memory for two tiles.
  static constexpr bool kHoldsQueries = kDim <= 128;
  static constexpr int kStages = kHoldsQueries ? 2 : 1;
};

template <int kDim, int kBits>
struct FragmentTile {
  using S = FragmentShape<kDim, kBits>;
  alignas(16) uint4 keys[S::kCodeTiles][S::kSteps][32];
  alignas(16) uint4 values[S::kCodeTiles][S::kSteps][32];
  alignas(16) float noise[S::kKeys];  ///< f^2 noise of each row
};
template <int kDim, int kBits>
struct FragmentShared {
  using S = FragmentShape<kDim, kBits>;
  FragmentTile<kDim, kBits> tiles[S::kStages];
  alignas(16) uint4 queries[S::kHoldsQueries ? 1 : S::kWarps * S::kSteps][32];
};

/// How many units that follow each other certainly lie in the same words, where these have `of_words` units each and a
/// warp has `units`.
__host__ __device__ constexpr int units_together(int units, int of_words) {
  return units % of_words == 0 ? of_words : of_words % units == 0 ? units : 1;
}

/// A warp's part of the decoding: of one tile of codes of each tile some units. What ask_*() brings put_*() writes.
template <int kDim, int kBits>
class FragmentDecoder {
 public:
  using S = FragmentShape<kDim, kBits>;
  using Tile = FragmentTile<kDim, kBits>;

  __device__ FragmentDecoder(const CodedRows& rows, uint32_t kv_head)
      : rows_(rows),
        base_(rows.blocks_at + kv_head * rows.head_stride),
        lane_(static_cast<int>(threadIdx.x) % 32),
        code_tile_(static_cast<int>(threadIdx.x) / 32 % S::kCodeTiles),
        first_(static_cast<int>(threadIdx.x) / 32 / S::kCodeTiles * S::kUnits) {}

  __device__ __forceinline__ void ask_keys(uint32_t tile) {
    const std::byte* const block = block_of(tile);
    const uint32_t code_tile = code_tile_of(tile);
    const auto* const words = reinterpret_cast<const uint2*>(
        block + (size_t{code_tile} * kCodeLanes + lane_) * S::kKeyWords * 4);
    const auto* const means =
        reinterpret_cast<const uint2*>(block + S::kCode.key_mean_at()) + lane_ % 4;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i)
      key_words_[i] = __ldg(words + step_of(i * kKeysTogether) / kKeysOfWord);
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) key_means_[u] = __ldg(means + 4 * step_of(u));
    const auto* const factors =
        reinterpret_cast<const uint32_t*>(block + S::kCode.factors_at()) + 16 * code_tile;
    key_factors_[0] = __ldg(factors + lane_ / 4);
    key_factors_[1] = __ldg(factors + lane_ / 4 + 8);
    noise_ = __ldg(reinterpret_cast<const float*>(block + S::kCode.noise_at()));
  }
  __device__ __forceinline__ void put_keys(Tile& to) const {
    constexpr uint32_t kMask = (kBits == 2 ? 0x03030303U : 0x0F0F0F0FU) << 1U;
    __half2 f[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) f[r] = __half2half2(__low2half(half2_of(key_factors_[r])));
    if (first_ == 0 && lane_ % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = __low2float(f[r]);
        to.noise[16 * code_tile_ + lane_ / 4 + 8 * r] = x * x * noise_;
      }
    }
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const int step = first_ + u;
      if (S::kSteps % S::kUnits != 0 && step >= S::kSteps) break;
      const auto place = static_cast<uint32_t>(step % kKeysOfWord * kBits);
      const uint2 words = key_words_[u / kKeysTogether];
      uint32_t x[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t codes = doubled_code(r == 0 ? words.x : words.y, place) & kMask;
        const __half2 low = levels_of<kBits>(__byte_perm(codes, k1024 >> 8U, 0x4140));
        const __half2 high = levels_of<kBits>(__byte_perm(codes, k1024 >> 8U, 0x4342));
        x[2 * r] = word_of(__hfma2(low, f[r], half2_of(key_means_[u].x)));
        x[2 * r + 1] = word_of(__hfma2(high, f[r], half2_of(key_means_[u].y)));
      }
      to.keys[code_tile_][step][lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  __device__ __forceinline__ void ask_values(uint32_t tile) {
    const std::byte* const block = block_of(tile);
    const uint32_t code_tile = code_tile_of(tile);
    const auto* const words = reinterpret_cast<const uint32_t*>(block + S::kCode.values_at()) +
                              (size_t{code_tile} * kCodeLanes + lane_) * S::kValueWords;
    const auto* const means =
        reinterpret_cast<const unsigned short*>(block + S::kCode.value_mean_at()) + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i)
      value_words_[i] = __ldg(words + step_of(i * kValuesTogether) / kValuesOfWord);
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      value_means_[u][0] = __ldg(means + 16 * step_of(u));
      value_means_[u][1] = __ldg(means + 16 * step_of(u) + 8);
    }
    // Of two neighbouring rows at once.
    const auto* const factors =
        reinterpret_cast<const uint2*>(block + S::kCode.factors_at()) + 8 * code_tile;
    value_factors_[0] = __ldg(factors + lane_ % 4);
    value_factors_[1] = __ldg(factors + lane_ % 4 + 4);
  }
  __device__ __forceinline__ void put_values(Tile& to) const {
    constexpr uint32_t kMask = (kBits == 2 ? 0x00030003U : 0x000F000FU) << 1U;
    const uint32_t more = kept(k1024);
    __half2 g[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      g[half] = half2_of(__byte_perm(value_factors_[half].x, value_factors_[half].y, 0x7632));
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const int step = first_ + u;
      if (S::kSteps % S::kUnits != 0 && step >= S::kSteps) break;
      const auto place = static_cast<uint32_t>(step % kValuesOfWord * 4 * kBits);
      uint32_t x[4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const __half2 mean = __half2half2(__ushort_as_half(value_means_[u][odd]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t codes = masked_with<kMask>(
              doubled_code(value_words_[u / kValuesTogether],
                           place + static_cast<uint32_t>((2 * half + odd) * kBits)),
              more);
          x[2 * odd + half] = word_of(__hfma2(levels_of<kBits>(codes), g[half], mean));
        }
      }
      to.values[code_tile_][step][lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  /// Writes as keys the means of blocks number apart * i of those that follow `first`, zeros from `count` on.
  __device__ void put_means(Tile& to, uint32_t first, uint32_t count, uint32_t apart) const {
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const int step = first_ + u;
      if (step >= S::kSteps) break;
      uint2 x[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t i = static_cast<uint32_t>(16 * code_tile_ + lane_ / 4 + 8 * r);
        if (i >= count) continue;
        const std::byte* const block = base_ + size_t{(first + i) * apart} * rows_.block_stride;
        x[r] = __ldg(reinterpret_cast<const uint2*>(block + S::kCode.key_mean_at()) + 4 * step +
                     lane_ % 4);
      }
      to.keys[code_tile_][step][lane_] = make_uint4(x[0].x, x[0].y, x[1].x, x[1].y);
    }
  }

 private:
  static constexpr int kKeysOfWord = 8 / kBits, kValuesOfWord = 4 / kBits;  // units
  static constexpr int kKeysTogether = units_together(S::kUnits, kKeysOfWord);
  static constexpr int kValuesTogether = units_together(S::kUnits, kValuesOfWord);
  static constexpr int kKeyLoads = S::kUnits / kKeysTogether;
  static constexpr int kValueLoads = S::kUnits / kValuesTogether;
  static_assert(kKeyLoads * kKeysTogether == S::kUnits);
  static_assert(kValueLoads * kValuesTogether == S::kUnits);

  /// The step of unit u; past the last one that, which is not written.
  __device__ int step_of(int u) const {
    return S::kSteps % S::kUnits == 0 ? first_ + u : min(first_ + u, S::kSteps - 1);
  }
  __device__ const std::byte* block_of(uint32_t tile) const {
    return base_ + size_t{tile / S::kTilesOfBlock} * rows_.block_stride;
  }
  /// Number of the warp's tile of codes in its block.
  __device__ uint32_t code_tile_of(uint32_t tile) const {
    return tile % S::kTilesOfBlock * S::kCodeTiles + static_cast<uint32_t>(code_tile_);
  }

  const CodedRows& rows_;
  const std::byte* base_;
  int lane_, code_tile_;
  int first_;  // the warp's first step
  uint2 key_words_[kKeyLoads], key_means_[S::kUnits];
  uint32_t key_factors_[2];  // (f, g)
  float noise_;
  uint32_t value_words_[kValueLoads];
  unsigned short value_means_[S::kUnits][2];
  uint2 value_factors_[2];
};

}  // namespace keyhole::gpu::coded
