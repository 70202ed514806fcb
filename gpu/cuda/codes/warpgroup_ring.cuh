// The codes of a warpgroup's turns (gpu/cuda/codes/warpgroup.cuh) on their way from memory to shared memory: the runs
// of chunks that warpgroups have, the ring of stages, and the means of blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/codes/tile_ring.cuh"
#include "gpu/cuda/codes/warpgroup_shape.cuh"
#include "gpu/cuda/codes/wide_params.h"
#include "gpu/cuda/common/async_copy.cuh"

namespace keyhole::gpu::codes {

/// What a thread knows of its warpgroup's turns. Each thread asks for pieces of its own, which others see once it has
/// waited for its copies and all have passed a barrier.
template <int kDim, int kBits, int kColumns, int kGroups>
class GroupRing {
 protected:
  using Shape = GroupShape<kDim, kBits, kColumns, kGroups>;
  static constexpr uint32_t kTurns = kCodeBlock / 64;  ///< of a block

  /// means: of shared memory, those of two blocks of each warpgroup, and the stages behind them.
  __device__ GroupRing(const WideParams& p, std::byte* means)
      : s_(p.step),
        kv_head_(blockIdx.y),
        group_(__shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0)),
        warp_(static_cast<int>(threadIdx.x) % 128 / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        means_(means),
        stages_(means + Shape::kMeans),
        base_(p.step.blocks + kv_head_ * p.step.head_stride) {}

  [[nodiscard]] __device__ uint32_t stages() const { return static_cast<uint32_t>(s_.stages); }
  /// A number of the lane's that stays in a register: left to itself, the compiler works addresses out again in each
  /// turn.
  [[nodiscard]] __device__ uint32_t kept(uint32_t x) const {
    return __shfl_sync(kWholeWarp, x, lane_);
  }
  /// Finds the lane's places for copies; returns where the warpgroup's part of the first stage is.
  __device__ uint32_t find_places_of_copies() {
    const auto warp = static_cast<uint32_t>(warp_), lane = static_cast<uint32_t>(lane_);
    const uint32_t own = shared_address(stages_) + static_cast<uint32_t>(group_) * Shape::kStage;
    own_place_ = kept(own + warp * Shape::kTileBytes + 16 * place_of_piece<Shape::kPieces>(lane));
    factors_place_ = kept(own + Shape::kFactorsAt + warp * Shape::kFactorBytes + 16 * lane);
    return own;
  }
  /// Asks for the first turns.
  __device__ void start(uint32_t ahead) {
    in_ = out_ = 0;
    find(first_);
    if (first_ < end_) take_means(first_);
    if (const uint32_t behind = (first_ / kTurns + 1) * kTurns; behind < end_) take_means(behind);
    for (uint32_t i = 0; i < ahead; ++i) take_in(first_ + i);
  }
  /// The turns of this warpgroup.
  __device__ void divide(uint32_t blocks) {
    // Fewer than 2^22 chunks times 2^10 runs.
    const uint32_t chunks = blocks * 2, runs = gridDim.x * kGroups;
    const uint32_t run = blockIdx.x * kGroups + static_cast<uint32_t>(group_);
    static_assert(kMostSplits * kGroups <= 1024);
    first_ = 2 * (run * chunks / runs);
    end_ = 2 * ((run + 1) * chunks / runs);
  }
  __device__ const std::byte* block_of(uint32_t turn) const {
    return base_ + turn / kTurns * s_.block_stride;
  }

  [[nodiscard]] __device__ uint32_t next(uint32_t at) const {
    return at + Shape::kStep == stages() * Shape::kStep ? 0 : at + Shape::kStep;
  }
  [[nodiscard]] __device__ std::byte* means_of(uint32_t turn) const {
    return means_ + (2 * static_cast<uint32_t>(group_) + turn / kTurns % 2) * Shape::kMeanBytes;
  }
  /// Finds this lane's pieces of a turn.
  __device__ void find(uint32_t turn) {
    const std::byte* const block = block_of(turn);
    const uint32_t tile = turn % kTurns / 2 * 8 + turn % 2 + 2 * static_cast<uint32_t>(warp_);
    from_ = block + tile * Shape::kTileBytes + 16 * static_cast<uint32_t>(lane_);
    factors_from_ = block + Shape::kShape.factors_at() + tile * Shape::kFactorBytes +
                    16 * static_cast<uint32_t>(lane_);
  }
  /// Asks for a turn's codes, for nothing behind the end. Every call is one group of copies.
  __device__ __forceinline__ void take_in(uint32_t turn) {
    if (turn < end_) {
      const uint32_t to = own_place_ + in_;
      constexpr uint32_t kCount = Shape::kTileBytes / 16;
      if (kCount >= 32 || lane_ < static_cast<int>(kCount)) {
        // Pieces 32 apart have places as far apart.
#pragma unroll
        for (uint32_t i = 0; i < kCount; i += 32)
          copy_async_once(to + 16 * i, from_ + 16 * i, policy_);
#pragma unroll
        for (uint32_t i = 0; i < kCount; i += 32) {
          copy_async_once(to + Shape::kValuesAt + 16 * i,
                          from_ + Shape::kShape.values_at() + 16 * i, policy_);
        }
      }
      if (lane_ < static_cast<int>(Shape::kFactorBytes / 16)) {
        copy_async_once(factors_place_ + in_, factors_from_, policy_);
      }
      in_ = next(in_);
      // The odd tiles of a chunk follow its even ones, then those of the next chunk.
      const uint32_t tiles = turn % 2 == 0 ? 1 : 7;
      from_ += tiles * Shape::kTileBytes;
      factors_from_ += tiles * Shape::kFactorBytes;
      if (turn % kTurns == kTurns - 1) {
        constexpr uint32_t kTilesOfBlock = kCodeBlock / kCodeTile;
        from_ += s_.block_stride - size_t{kTilesOfBlock} * Shape::kTileBytes;
        factors_from_ += s_.block_stride - size_t{kTilesOfBlock} * Shape::kFactorBytes;
      }
    }
    commit_copies();
  }

  /// Asks for the means of a turn's block, in the group of the copies that follow.
  __device__ void take_means(uint32_t turn) const {
    constexpr uint32_t kPieces = Shape::kMeanBytes / 16;
    static_assert(kPieces <= 128);
    const uint32_t i = threadIdx.x % 128;
    if (i >= kPieces) return;
    copy_async(shared_address(means_of(turn)) + 16 * i,
               block_of(turn) + Shape::kShape.key_mean_at() + 16 * i, true);
  }

  const CodesParams& s_;
  const uint32_t kv_head_;
  const int group_, warp_, lane_;  ///< the warpgroup, and the warp in it
  std::byte* const means_;         ///< of two blocks of each warpgroup
  std::byte* const stages_;        ///< each of them has the warpgroups' turns, one after the other
  uint32_t first_, end_;           ///< of the warpgroup's turns
  uint32_t in_ = 0, out_ = 0;      ///< bytes from the first stage

 private:
  const std::byte* const base_;  ///< the KV head's first block
  /// The lane's pieces of the next turn to be asked for, the first of keys and one of factors, and their places in the
  /// first stage.
  const std::byte *from_, *factors_from_;
  uint32_t own_place_, factors_place_;
  const uint64_t policy_ = read_once();  ///< of copies of codes
};

}  // namespace keyhole::gpu::codes
