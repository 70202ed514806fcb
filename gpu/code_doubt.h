// What steps over codes keep on the device for heads whose codes cannot tell which rows weigh (cpu/code_doubt.h): the
// kernel that reads the chosen rows leaves such heads here. Its clusters of thread blocks take them up themselves
// (gpu/cuda/codes/settle_head.cuh); where there are none, the kernel behind it does (gpu/cuda/codes/settle.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/code_doubt.h"
#include "cpu/types.h"
#include "gpu/alignment.h"

namespace keyhole::gpu {

/// Most rows of a KV head that a step reads exactly, but in doubt.
inline constexpr uint32_t kMostDeviceRows = 64;

/// What the encoder knows of a KV head's rows in a layer. Blocks that were cut off, or replaced, still count: that
/// costs time.
struct CodeFigures {
  uint64_t noise_sum = 0;  ///< of the means of f^2 noise of its blocks, in units of kNoiseUnit
  uint32_t blocks = 0;     ///< that this is the sum of
  uint32_t widest =
      0;  ///< the largest f^2 noise of a row, as the bits of a float; infinite: a block has kUnknownNoise
};
/// Sums of whole numbers are the same in any order.
inline constexpr float kNoiseUnit = 1.0F / (1U << 20U);

/// Query heads that the second look at codes takes at once, those of a part of a group: it has rows of its own.
inline constexpr uint32_t kDoubtHeads = 4;
inline constexpr uint32_t kDoubtParts = kMaxDeviceGroup / kDoubtHeads;
/// One more than those that look at codes: in the last one all rows are read.
inline constexpr uint32_t kDoubtPasses = kDoubtRounds + 1;

/// A KV head in a step. What says so is zero between steps.
struct DoubtRecord {
  static constexpr uint32_t kDoubted = 1;  ///< codes cannot tell which rows weigh
  static constexpr uint32_t kRounded = 2;  ///< what rounding left of the codes' weights would show
  static constexpr uint32_t kTakenAway =
      4;  ///< what a look at listed rows has left of the codes' weights is rounding
  static constexpr uint32_t kMany =
      8;                      ///< rows that might weigh are in too many places to list these
  uint32_t reasons = 0;       ///< zero between steps
  uint32_t chosen_count = 0;  ///< of
  uint32_t chosen[kMostDeviceRows] = {};  ///< the rows that were read
  float lse[kMaxDeviceGroup] = {};        ///< of all rows and resident tokens, base 2
  float far[kMaxDeviceGroup] =
      {};  ///< what a row's logit may be off by at most, base 2, before a soft-cap
  /// Of each part in each pass: rows that are read beside the chosen ones, and whether a log-sum-exp fell so far that
  /// there is another pass. Zero between steps.
  uint32_t found[kDoubtParts][kDoubtPasses] = {};
  uint32_t falls[kDoubtParts][kDoubtPasses] = {};
};

/// All of them in a step, and what they have come to so far.
struct DoubtBoard {
  uint64_t doubted = 0;   ///< (KV head, step) that read more rows
  uint64_t given_up = 0;  ///< of these, those that read more than an eighth of all
  uint64_t rows = 0;      ///< beside those that were chosen
  // Zero between steps.
  uint32_t heads = 0;                     ///< KV heads with reasons
  uint32_t next = 0, done = 0, left = 0;  ///< pieces of work, and thread blocks that have left
  uint32_t again[kDoubtPasses] = {};      ///< parts that have another pass
};

/// In device memory, zero at first: `[parts]` DoubtBoard, `[parts, kv_heads]` uint32 of those on it,
/// `[parts, kv_heads]` DoubtRecord, and queries `[parts, kv_heads, heads of a part, dim]` fp32, times the logits' scale
/// and log2(e), of KV heads on the board.
struct DoubtLayout {
  size_t list = 0, records = 0, queries = 0, bytes = 0;

  /// heads: query heads of a KV head, of all tokens of a step; parts: StepParts.
  DoubtLayout(size_t kv_heads, size_t heads, size_t dim, size_t parts = 1) {
    // The last part has room for as many as the others.
    if (parts > 1) heads += kMaxDeviceGroup;
    const auto aligned = [](size_t n) {
      return (n + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    };
    list = aligned(parts * sizeof(DoubtBoard));
    records = list + aligned(parts * kv_heads * sizeof(uint32_t));
    queries = records + aligned(parts * kv_heads * sizeof(DoubtRecord));
    bytes = queries + aligned(kv_heads * heads * dim * sizeof(float));
  }
};

}  // namespace keyhole::gpu
