// Tiles of codes as Hopper's tensor cores read keys and values: a warpgroup reads codes, makes 16-bit numbers of them
// and writes these to shared memory, which no other memory sees.
//
// Keys lie as rows of components, values as components of rows: that is how their codes lie in words
// (cpu/code_layout.h), and products read either.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"
#include "gpu/cuda/common/copy_engine.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/wgmma.cuh"
#include "gpu/cuda/prefill/coded_kernels.h"
#include "gpu/cuda/prefill/coded_levels.cuh"
#include "gpu/cuda/prefill/coded_query_rows.cuh"

namespace keyhole::gpu::coded {

constexpr int kQueries = static_cast<int>(kCodedQueries);
constexpr int kGroupThreads = 128, kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kWarps = kGroupThreads / 32;  ///< of the warpgroup that decodes
constexpr int kStages = 2;                  ///< of keys
/// Noise of a tile's rows is read after the tile's keys are no longer in use.
constexpr int kNoiseStages = 4;
constexpr int kSideStages = 3;
constexpr int kDecoderBarrier = 5;  ///< of the block's barriers, that of the warpgroup that decodes

template <int kDim, int kBits>
struct Shape {
  static constexpr CodeShape kCode{kDim, kBits, kBits};
  static constexpr int kColumns = static_cast<int>(coded_columns(kDim));
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kKeys = kColumns <= 128 ? 128 : 64;  ///< rows of a tile
  static constexpr int kValueStages =
      kColumns <= 128 ? 3 : kStages;  ///< as many as there is room for
  static constexpr int kTilesOfBlock = static_cast<int>(kCodeBlock) / kKeys;
  static constexpr int kCodeTilesOfWarp = kKeys / static_cast<int>(kCodeTile) / kWarps;
  static constexpr int kKeyWords = static_cast<int>(kCode.key_words());
  static constexpr int kValueWords = static_cast<int>(kCode.value_words());
  static constexpr int kSteps = kDim / 16;
  static constexpr int kQueryPanel = kQueries * kPanelColumns;  // elements
  static constexpr int kKeyPanel = kKeys * kPanelColumns;
  static constexpr int kValuePanel = kColumns * kPanelColumns;
};

/// What belongs to a tile's codes: it is copied while tiles before it are decoded. Means and noise lie as in the block.
template <int kDim, int kBits>
struct Side {
  alignas(16) __half2 factors[Shape<kDim, kBits>::kKeys];  ///< (f, g)
  alignas(16) __half key_mean[kDim];
  __half value_mean[kDim];
  float noise, unused[3];
};

template <int kDim, int kBits>
struct Shared {
  using S = Shape<kDim, kBits>;
  alignas(1024) __half queries[S::kPanels * S::kQueryPanel];
  alignas(1024) __half keys[kStages][S::kPanels * S::kKeyPanel];
  alignas(1024) __half values[S::kValueStages][S::kKeys / kPanelColumns * S::kValuePanel];
  // Eight more columns, whose product is the noise of rows times that of queries: each is a sum of two numbers of fp16.
  // Behind those of the queries lie zeros; behind those of keys eight rows that only meet these.
  alignas(128) __half query_noise[2 * kQueries][8];
  alignas(128) __half key_noise[kStages * S::kKeys + 8][8];
  alignas(16) float noise[kNoiseStages][S::kKeys];
  Side<kDim, kBits> sides[kSideStages];
  CopyBarrier queries_are_here;
  CopyBarrier keys_are_here[kStages], values_are_here[S::kValueStages];
  CopyBarrier keys_are_used[kStages], values_are_used[S::kValueStages];
};

/// Lets the tensor cores see what this thread has written to shared memory.
__device__ inline void fence_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Loads a lane's words of a tile of 16 rows.
template <int kWords>
__device__ inline void load_code_words(const std::byte* from, int lane, uint32_t (&words)[kWords]) {
  const auto* at = reinterpret_cast<const uint32_t*>(from) + lane * kWords;
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(at + i));
      words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(at + i));
      words[i] = x.x, words[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(at + i);
  }
}

/// What the noise of a KV head's rows is multiplied by, so that fp16 has it: the most of it becomes 1 .. 2.
__device__ inline float noise_unit(const CodedRows& rows, uint32_t kv_head) {
  const float widest = __uint_as_float(rows.figures[kv_head].widest);
  return widest > 0.0F && widest < HUGE_VALF
             ? exp2f(static_cast<float>(min(max(-ilogbf(widest), -100), 100)))
             : 1.0F;
}
/// A query's share of that product, of noise as in CodedQuery over the factor that makes a logit of a product; 0: it
/// would be too large, or is more than kMostNoiseBias for some row, or logits have a soft-cap, and the noise is taken
/// from logits one by one.
__device__ inline float noise_share(const CodedParams& a, uint32_t kv_head, const CodedQuery& q) {
  constexpr float kMost = 30000.0F;  // of fp16
  const float share = q.noise / (q.unit * noise_unit(a.rows, kv_head));
  return has_small_noise(a, kv_head, q) && share < kMost ? share : 0.0F;
}

/// A warp's part of the decoding: code tiles warp * kCodeTilesOfWarp .. of each tile of rows.
template <int kDim, int kBits>
class Decoder {
 public:
  using S = Shape<kDim, kBits>;
  static constexpr int kOwn = S::kCodeTilesOfWarp;

  using Belongings = Side<kDim, kBits>;

  /// sides: the address of as many as kSideStages.
  __device__ Decoder(const CodedRows& rows, uint32_t kv_head, uint32_t sides)
      : rows_(rows),
        sides_(sides),
        unit_(noise_unit(rows, kv_head)),
        base_(rows.blocks_at + kv_head * rows.head_stride),
        warp_(static_cast<int>(threadIdx.x) % kGroupThreads / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Asks for what belongs to tile `tile`, the `number`-th; past the end for nothing. Every call is one group of
  /// copies.
  __device__ void ask_side(uint32_t number, uint32_t tile, bool there) const {
    constexpr uint32_t kFactors = S::kKeys / 4, kMeans = (4 * kDim + 16) / 16;
    static_assert(kFactors + kMeans <= kGroupThreads);
    static_assert(S::kCode.noise_at() - S::kCode.key_mean_at() == size_t{4} * kDim);
    if (there && threadIdx.x < kFactors + kMeans) {
      const std::byte* const block = block_of(tile);
      const bool is_factors = threadIdx.x < kFactors;
      const uint32_t piece = is_factors ? threadIdx.x : threadIdx.x - kFactors;
      const std::byte* const from =
          is_factors ? block + S::kCode.factors_at() + size_t{code_tile(tile, 0) - own_tile()} * 64
                     : block + S::kCode.key_mean_at();
      const uint32_t to = side_of(number) + (is_factors ? 0 : offsetof(Belongings, key_mean));
      copy_async(to + 16 * piece, from + size_t{16} * piece, true);
    }
    commit_copies();
  }
  /// Waits until what belongs to the tile that was asked for before the last is here, for the whole warpgroup.
  __device__ static void wait_for_side() {
    wait_for_copies<1>();
    asm volatile("bar.sync %0, %1;" ::"n"(kDecoderBarrier), "n"(kGroupThreads) : "memory");
  }

  __device__ void ask_keys(uint32_t tile) {
    const std::byte* const block = block_of(tile);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      load_code_words(block + size_t(kCodeLanes) * S::kKeyWords * 4 * code_tile(tile, i), lane_,
                      keys_[i]);
    }
  }
  __device__ void ask_values(uint32_t tile) {
    const std::byte* const block = block_of(tile) + S::kCode.values_at();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      load_code_words(block + size_t(kCodeLanes) * S::kValueWords * 4 * code_tile(tile, i), lane_,
                      values_[i]);
    }
  }

  /// Writes the keys that ask_keys() has brought, and f^2 noise of their rows, in fp32 and as columns. number: of the
  /// tile, as in ask_side(); to, columns_to, noise_to: addresses of shared memory.
  __device__ void put_keys(uint32_t number, uint32_t to, uint32_t columns_to,
                           uint32_t noise_to) const {
    constexpr int kPer = 8 / kBits;
    constexpr uint32_t kMask = (kBits == 2 ? 0x03030303U : 0x0F0F0F0FU) << 1U;
    const uint32_t side = side_of(number);
    const int g = lane_ / 4, t = lane_ % 4,
              own_row = warp_ * kOwn * static_cast<int>(kCodeTile) + g;
    // Of 64 components, rows with an odd number write others at a time than even ones: number s ^ 2 of four steps of
    // 16, so that neighbouring rows lie in different banks.
    const bool odd = g % 2 != 0;
    const uint32_t means = side + offsetof(Belongings, key_mean) + 8 * static_cast<uint32_t>(t);
    const uint32_t away = odd ? 64 : 0, turn = odd ? 2 * kBits : 0;
    const auto mean_of = [&](int s) {
      return load_two(means + static_cast<uint32_t>(32 * s) + ((s & 2) == 0 ? away : 0U - away));
    };
    const float of_block = __uint_as_float(load_one(side + offsetof(Belongings, noise)));
    uint2 mean = mean_of(0);
    const auto row_of = [&](int i, int r) {
      return static_cast<uint32_t>(own_row + i * static_cast<int>(kCodeTile) + 8 * r);
    };
    __half2 f[kOwn][2];
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      const __half x = __ushort_as_half(load_half(side + 4 * row_of(i / 2, i % 2)));
      f[i / 2][i % 2] = half2_of(kept(word_of(__half2half2(x))));
    }
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) {
        const float x = __low2float(f[i / 2][i % 2]);
        const float noise = x * x * of_block;
        store_one(noise_to + 4 * row_of(i / 2, i % 2), __float_as_uint(noise));
        const float scaled = noise * unit_;
        const __half high = __float2half_rn(scaled);
        const __half low = __float2half_rn(scaled - __half2float(high));
        store_two(columns_to + 16 * row_of(i / 2, i % 2), word_of(__halves2half2(high, low)),
                  word_of(__halves2half2(high, __ushort_as_half(0))));
      }
    }
    // A piece of 16 bytes lies at its number ^ row % 8.
    to += static_cast<uint32_t>(own_row * 128 + ((t / 2 ^ g ^ (odd ? 4 : 0)) * 16) + t % 2 * 8);
    constexpr int kPadded = (S::kSteps + 3) / 4 * 4;
#pragma unroll
    for (int s = 0; s < kPadded; ++s) {
      const uint2 next = s + 1 < kPadded ? mean_of(s + 1) : mean;
      const uint32_t at = (to ^ static_cast<uint32_t>(s % 4 * 32)) + s / 4 * S::kKeyPanel * 2;
      if (S::kSteps % 4 == 0 || (odd ? s ^ 2 : s) < S::kSteps) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            constexpr int kLast = S::kKeyWords - 2;
            const int own = s / kPer * 2, other = (s ^ 2) / kPer * 2;
            uint32_t word = keys_[i][(own < kLast ? own : kLast) + r];
            auto place = static_cast<uint32_t>(s % kPer * kBits);
            if constexpr (kPer == 4) {
              place += (s & 2) == 0 ? turn : 0U - turn;
            } else {
              if (odd) word = keys_[i][(other < kLast ? other : kLast) + r];
            }
            const uint32_t codes = doubled_code(word, place) & kMask;
            const __half2 low = levels_of<kBits>(__byte_perm(codes, k1024 >> 8U, 0x4140));
            const __half2 high = levels_of<kBits>(__byte_perm(codes, k1024 >> 8U, 0x4342));
            store_two(at + (i * static_cast<int>(kCodeTile) + 8 * r) * 128,
                      word_of(__hfma2(low, f[i][r], half2_of(mean.x))),
                      word_of(__hfma2(high, f[i][r], half2_of(mean.y))));
          }
        }
      }
      mean = next;
    }
  }

  /// Writes the values that ask_values() has brought. to: an address of shared memory.
  __device__ void put_values(uint32_t number, uint32_t to) const {
    constexpr int kPer = 16 / kBits;
    constexpr uint32_t kMask = (kBits == 2 ? 0x00030003U : 0x000F000FU) << 1U;
    const uint32_t side = side_of(number);
    const int g = lane_ / 4, t = lane_ % 4, row = warp_ * kOwn * static_cast<int>(kCodeTile);
    const uint32_t means = side + offsetof(Belongings, value_mean) + 2 * static_cast<uint32_t>(g);
    const auto mean_of = [&](int m, int odd) {
      return __half2half2(__ushort_as_half(load_half(means + 2 * (16 * m + 8 * odd))));
    };
    __half2 mean[2] = {mean_of(0, 0), mean_of(0, 1)};
    __half2 factor[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 two = load_two(side + 4 * static_cast<uint32_t>(row + 2 * t + 8 * half) +
                                   i * static_cast<int>(kCodeTile) * 4);
        factor[i][half] = half2_of(kept(__byte_perm(two.x, two.y, 0x7632)));
      }
    }
    const uint32_t more = kept(k1024);
    to += static_cast<uint32_t>(row / kPanelColumns * S::kValuePanel * 2 + g * 128 +
                                (row % kPanelColumns / 8 ^ g) * 16 + 4 * t);
#pragma unroll
    for (int m = 0; m < S::kSteps; ++m) {
      __half2 next[2] = {};
      if (m + 1 < S::kSteps) next[0] = mean_of(m + 1, 0), next[1] = mean_of(m + 1, 1);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int component = 16 * m + 8 * odd;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int place = 4 * m + 2 * half + odd;
            const uint32_t codes = masked_with<kMask>(
                doubled_code(values_[i][place / kPer], place % kPer * kBits), more);
            store_one((to ^ static_cast<uint32_t>((2 * i + half) * 16)) + component * 128,
                      word_of(__hfma2(levels_of<kBits>(codes), factor[i][half], mean[odd])));
          }
        }
        mean[odd] = next[odd];
      }
    }
  }

  /// Asks for the means of `count` blocks, block `apart` * i as row i, and zeros behind them; to: an address of shared
  /// memory. By the warpgroup.
  __device__ void ask_means(uint32_t to, uint32_t count, uint32_t apart) const {
    constexpr int kPieces = S::kColumns / 8;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) % kGroupThreads; i < S::kKeys * kPieces;
         i += kGroupThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const bool there = row < static_cast<int>(count) && 8 * piece < kDim;
      const size_t block = there ? static_cast<uint32_t>(row) * apart : 0;
      const int at = piece / 8 * S::kKeyPanel + row * kPanelColumns + ((piece % 8) ^ (row % 8)) * 8;
      copy_async(
          to + 2 * static_cast<uint32_t>(at),
          base_ + block * rows_.block_stride + S::kCode.key_mean_at() + (there ? 16 * piece : 0),
          there);
    }
  }

  /// Lets L2 fetch a tile's codes.
  __device__ void prefetch(uint32_t tile) const {
    constexpr uint32_t kKeyBytes = kCodeLanes * S::kKeyWords * 4, kOf = S::kKeys / kCodeTile,
                       kValueBytes = kCodeLanes * S::kValueWords * 4;
    const std::byte* const block = block_of(tile);
    const uint32_t first = tile % S::kTilesOfBlock * kOf;
    if (threadIdx.x == 0) {
      prefetch_bulk(block + size_t{kKeyBytes} * first, kKeyBytes * kOf);
      prefetch_bulk(block + S::kCode.values_at() + size_t{kValueBytes} * first, kValueBytes * kOf);
    }
  }

 private:
  __device__ uint32_t side_of(uint32_t number) const {
    return sides_ + number % kSideStages * static_cast<uint32_t>(sizeof(Belongings));
  }
  __device__ const std::byte* block_of(uint32_t tile) const {
    return base_ + size_t{tile / S::kTilesOfBlock} * rows_.block_stride;
  }
  /// Number of the warp's i-th tile of codes in its block.
  __device__ uint32_t code_tile(uint32_t tile, int i) const {
    constexpr uint32_t kOf = S::kKeys / kCodeTile;
    return tile % S::kTilesOfBlock * kOf + own_tile() + static_cast<uint32_t>(i);
  }
  __device__ uint32_t own_tile() const { return static_cast<uint32_t>(warp_ * kOwn); }

  const CodedRows& rows_;
  uint32_t sides_;
  float unit_;
  const std::byte* base_;
  int warp_, lane_;
  uint32_t keys_[kOwn][S::kKeyWords];
  uint32_t values_[kOwn][S::kValueWords];
};

}  // namespace keyhole::gpu::coded
