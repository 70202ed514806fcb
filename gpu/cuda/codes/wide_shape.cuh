// How a thread block of the pass for many query rows (gpu/cuda/codes/wide.cuh) divides the work and its shared memory.
#pragma once

#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/codes/wide_params.h"

namespace keyhole::gpu::codes {

/// Value codes as fp16 numbers 1 + u / unit: the means of values, in the units of their sums, are fp16 numbers here,
/// too.
template <int kBits>
struct OnesUnits {
  static constexpr float kOdd = 16.0F, kEven = kBits == 2 ? 4.0F : kOdd;
};

/// kHasHalves: whether keys, with factors, and values of a chunk lie in places of their own.
template <int kDim, int kBits, int kColumns, bool kHasHalves = (kDim > 256)>
struct WideShape {
  static constexpr CodeShape kShape{kDim, kBits, kBits};
  static constexpr int kHeads = 8 * kColumns,
                       kTiles = 2 * kColumns;      ///< query rows, and tiles of 4
  static constexpr int kSteps = (kDim + 31) / 32;  ///< products of a score
  static constexpr int kWarps = static_cast<int>(kWideWarps);
  static constexpr int kPairs = static_cast<int>(kWideRows / kMaximumRows);  ///< of tiles
  static constexpr int kSlices = 4, kProducts = kDim / 16;
  static constexpr int kOwn = (kProducts + kSlices - 1) / kSlices;  ///< products of a warp
  static constexpr uint32_t kKeyBytes = kShape.key_bytes() / 2;
  static constexpr uint32_t kValueBytes = kShape.value_bytes() / 2;
  static constexpr bool kHalves = kHasHalves;
  static constexpr uint32_t kFactorBytes = kWideRows * 4;
  static constexpr uint32_t kValuesAt = kHalves ? 0 : kKeyBytes;
  static constexpr uint32_t kFactorsAt = kHalves ? kKeyBytes : kKeyBytes + kValueBytes;
  static constexpr uint32_t kStage = kFactorsAt + kFactorBytes;
  static_assert(kValuesAt + kValueBytes <= kStage);
  static constexpr uint32_t kMeanBytes = 2 * kDim * 2 + 16;  ///< both means and the noise
  static_assert(kShape.noise_at() - kShape.key_mean_at() == kMeanBytes - 16);
  static_assert(kWarps == 2 * kPairs && kWarps == 2 * kSlices);
  /// A row of weights is longer than its contents, so that 8 of them lie in different banks.
  static constexpr int kWeightRow = static_cast<int>(kWideRows) + 8;
  static constexpr int kStateRow = kDim + 4;
};

template <int kDim, int kBits, int kColumns>
struct WideShared {
  using Shape = WideShape<kDim, kBits, kColumns>;
  static constexpr int kHeads = Shape::kHeads;
  /// The b registers of the products of queries: [tile of 4][step][lane].
  alignas(16) uint2 fragments[Shape::kTiles][Shape::kSteps][32];
  alignas(16) float rows[kHeads][kDim];  ///< times scale log2(e)
  alignas(16) __half weights[kHeads][Shape::kWeightRow];
  /// Of the weights of each pair of tiles, and of these times value factors: 4 high parts, 4 low parts.
  alignas(16) __half sums[kHeads][8];
  alignas(16) __half scaled[kHeads][8];
  float middle[2][kHeads];               ///< logits of the means of an even block and an odd one
  float largest[Shape::kPairs][kHeads];  ///< logits
  float top[kHeads],
      keep[kHeads];     ///< running maxima, and what a change of them multiplies sums with
  float total[kHeads];  ///< sums of weights
  float resident_top[kHeads], resident_sum[kHeads];
  HeadConstants constants[kHeads];
};

template <int kDim, int kBits, int kColumns>
constexpr int wide_occupancy() {
  if (kDim > 256) return kColumns == 1 && kBits == 2 ? 2 : 1;
  return kColumns * kDim <= 4 * 128 || kColumns <= 3 ? 2 : 1;
}

}  // namespace keyhole::gpu::codes
