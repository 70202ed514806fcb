// What a choice among lists tells the steps behind it: whether these read all blocks without choosing
// (ListShare::keeps).
//
// Heads that look at everything do so in the next steps, too, and a step that chooses and then reads next to all rows
// takes a third longer than one that reads all blocks at once. What decides is the layer and not a KV head: the thread
// blocks of the pass are divided evenly among KV heads, so one of these that reads all its blocks behind a choice
// decides the time of the step.
//
// ORDER. A choice starts when all blocks of the kernel before it have, and these when all of the pass before them have
// waited for its own choice. So what the choice of the step before has left may be read at once. Every thread block
// arrives once, behind its own reading, and the last one writes what the next step reads: sums of integers, which do
// not depend on the order.
#pragma once

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

/// Whether a step is likely to read all blocks, by a warp that does not wait for the choice: this may be about to
/// change what it reads.
__device__ inline bool may_read_all(const CodesParams& s) {
  const ListMemory* const memory = s.lists.memory;
  const bool may = memory != nullptr && __ldcv(&memory->left) != 0;
  return __shfl_sync(kWholeWarp, may ? 1 : 0, 0) != 0;
}

/// For one thread of each thread block of the choice.
class StepMemory {
 public:
  __device__ explicit StepMemory(const CodesParams& s)
      : s_(s),
        memory_(s.lists.share.keeps != 0 && gridDim.x <= kMostBlocks ? s.lists.memory : nullptr) {}

  /// Steps that read all blocks, with this one, before one chooses.
  [[nodiscard]] __device__ uint32_t left() const {
    return memory_ == nullptr ? 0 : __ldcv(&memory_->left);
  }

  /// Arrives, when all threads of the block know left(). by_share, pairs: of a KV head's pairs of tiles, those that the
  /// share has read and all that were chosen, by one thread block of it; else 0. Waits for nothing: the answer comes
  /// with conclude().
  __device__ void arrive(uint32_t by_share, uint32_t pairs) {
    if (memory_ == nullptr) return;
    own_ = kOne | static_cast<unsigned long long>(units_of(by_share)) << kBits | units_of(pairs);
    before_ = atomicAdd(&memory_->sums, own_);
  }

  /// In a step that has read all blocks without choosing. left: of this step.
  __device__ void conclude(uint32_t left) const {
    if (is_last()) write(left - 1);
  }
  /// In a step that has chosen. blocks: of a KV head.
  __device__ void conclude_choice(uint32_t blocks) const {
    if (!is_last()) return;
    const unsigned long long sums = before_ + own_;
    const auto by_share = static_cast<float>(sums >> kBits & kMask);
    const auto chosen = static_cast<float>(sums & kMask);
    // A step by lists takes longer by the choice, and reads lists a little slower than blocks. Where that leaves
    // nothing, the spec has asked for lists of few rows: they are read, but for heads that look at everything.
    const auto pairs = static_cast<float>(s_.kv_heads * units_of(blocks * kBlockMaxima));
    const auto pair_bytes = static_cast<float>(
        2 * kCodeLanes * 4 * (s_.shape.key_words() + s_.shape.value_words()) + kPairRows * 4);
    const float worth = kWorthPairs * pairs - s_.lists.choice_bytes / (kUnit * pair_bytes);
    write(chosen > fmaxf(worth, kMostOfShare * by_share) ? s_.lists.share.keeps : 0);
  }

 private:
  static constexpr uint32_t kUnit = 16;  ///< pairs that sums count as one, rounded up
  static constexpr uint32_t kBits = 24;  ///< of a sum
  static constexpr unsigned long long kMask = (1ULL << kBits) - 1, kOne = 1ULL << (2 * kBits);
  static constexpr uint32_t kMostBlocks = 0xFFFF;
  // By the times of an H100 (bench/RESULTS.md, "Lists of codes on a device"): so many pairs of lists take as long as
  // one of blocks.
  static constexpr float kWorthPairs = 0.8F;
  static constexpr float kMostOfShare = 1.5F;

  [[nodiscard]] __device__ uint32_t units_of(uint32_t pairs) const {
    return min((pairs + kUnit - 1) / kUnit, static_cast<uint32_t>(kMask) / s_.kv_heads);
  }
  [[nodiscard]] __device__ bool is_last() const {
    return memory_ != nullptr && (before_ >> (2 * kBits)) + 1 == gridDim.x;
  }
  __device__ void write(uint32_t left) const {
    memory_->sums = 0;
    memory_->left = left;
  }

  const CodesParams& s_;
  ListMemory* memory_;  ///< null: nothing is remembered
  unsigned long long own_ = 0, before_ = 0;
};

}  // namespace keyhole::gpu::codes
