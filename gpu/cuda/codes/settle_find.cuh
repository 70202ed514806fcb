// The second look at the codes of a KV head in doubt: the pass of gpu/cuda/codes/attend.cuh, which here finds the
// rows that may weigh and leaves a bit for each.
//
// A row is found if, in one of the heads, its logit by code plus kDoubtDeviations standard deviations of its error
// reaches the log-sum-exp less the limit's `light`, if the step chose it before, or if its block has kUnknownNoise.
// So whether a row is found depends on the row alone, and no list of rows needs space or an order.
//
// The pass looks at all rows and sums up those that are not found. Alternatively it looks at listed pairs of tiles
// (gpu/cuda/codes/settle_list.cuh), where few pairs have a row that can be found: then it sums up the rows that are
// found beside the chosen ones, and their state is subtracted from the state that the step had.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/doubt.cuh"

namespace keyhole::gpu::codes {

static_assert(kMaximumRows == 32, "a pair of tiles has a word of bits");

/// Number of parts of a group.
__device__ inline uint32_t doubt_parts(const CodesParams& s) {
  return (s.group + kDoubtHeads - 1) / kDoubtHeads;
}

/// A part of a KV head's group in a pass of a step.
struct DoubtUnit {
  uint32_t kv_head;
  uint32_t first;   ///< place of its first split's state among those of the step
  uint32_t part;    ///< heads kDoubtHeads * part and those behind it
  uint32_t pass;    ///< of kDoubtPasses
  uint32_t splits;  ///< that its rows are divided into
  /// Whether the pass looks at listed pairs alone. What its splits leave is then added to the state that the step
  /// had, which lies behind theirs.
  bool is_listed;

  /// The words with a bit for each row.
  [[nodiscard]] __device__ uint32_t* found(const CodesParams& s) const {
    return s.found + (size_t{kv_head} * doubt_parts(s) + part) * s.block_capacity * kBlockMaxima;
  }
  [[nodiscard]] __device__ size_t slot(uint32_t split) const { return size_t{first} + split; }
};

/// Gathers bits 0, 4, .. 28 of a word side by side.
__device__ inline uint32_t every_fourth_bit(uint32_t x) {
  x &= 0x11111111U;
  x = (x | x >> 3U) & 0x03030303U;
  x = (x | x >> 6U) & 0x000F000FU;
  return (x | x >> 12U) & 0xFFU;
}

/// Finds rows; one object for each warp.
class RowFinder {
 public:
  __device__ RowFinder(const CodesParams& s, const DoubtUnit& unit, const HeadConstants& constants)
      : record_(s.doubt.records[unit.kv_head]), unit_(unit), words_(unit.found(s)) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t head = kDoubtHeads * unit.part + lane % 4;
    unit_reach_ = doubt_reach(constants.noise, 1.0F);
    bound_ = head >= s.group                 ? -kMinusInf
             : unit.pass == kDoubtPasses - 1 ? kMinusInf
                                             : doubt_bound(s, __ldcg(&record_.lse[head]));
    const uint32_t chosen = __ldcg(&record_.chosen_count);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t number = lane + 32 * i;
      chosen_[i] = number < chosen ? __ldcg(&record_.chosen[number]) : ~0U;
    }
  }

  /// Looks at the 32 rows of pair number `pair`. scores: those of the tiles; middle: that of the block's mean, for
  /// the lane's head.
  template <class Tile>
  __device__ void find(uint32_t pair, const Tile (&tiles)[2], const int (&scores)[2][1][4],
                       const HeadConstants& head, float noise, float middle,
                       float2 (&logits)[2][1]) {
    const uint32_t lane = threadIdx.x % 32;
    const float far = unit_reach_ * sqrtf(noise);
    const bool is_unknown = noise >= kUnknownNoise;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 factors = tiles[i / 2].factors[i % 2];
      const float f = __low2float(factors);
      const float product = fmaf(f, score_of_row(scores[i / 2][0], i % 2, head), middle);
      uint32_t heads = __ballot_sync(kWholeWarp, fmaf(far, f, product) > bound_);
      // The four lanes of a row are neighbours.
      heads |= heads >> 1U;
      heads |= heads >> 2U;
      found |= every_fourth_bit(heads) << (8 * i);
    }
    if (is_unknown || bound_ == kMinusInf) found = ~0U;
    const uint32_t chosen =
        __reduce_or_sync(kWholeWarp, bit_of(chosen_[0], pair) | bit_of(chosen_[1], pair));
    found = __reduce_or_sync(kWholeWarp, found) & ~chosen;
    count_ += __popc(found);
    const uint32_t read = unit_.is_listed ? found : found | chosen;
    if (lane == 0) words_[pair] = read;
    const uint32_t left_out = unit_.is_listed ? ~read : read;
    if (left_out == 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = 16 * i + lane / 4;
      if ((left_out >> row & 1U) != 0) logits[i][0].x = kMinusInf;
      if ((left_out >> (row + 8) & 1U) != 0) logits[i][0].y = kMinusInf;
    }
  }

  /// Adds the number of found rows to the record. Called once all pairs were looked at.
  __device__ void count() const {
    if (threadIdx.x % 32 == 0 && count_ != 0) {
      atomicAdd(&record_.found[unit_.part][unit_.pass], count_);
    }
  }

 private:
  __device__ static uint32_t bit_of(uint32_t row, uint32_t pair) {
    return row / 32 == pair ? 1U << (row % 32) : 0;
  }

  DoubtRecord& record_;
  DoubtUnit unit_;
  uint32_t* words_;
  float unit_reach_;  ///< for f^2 noise = 1
  float bound_;
  uint32_t chosen_[2];
  uint32_t count_ = 0;
};

/// The split of a thread block in a second look.
struct DoubtSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentShare<kDim, kHeadTiles, kAttendWarps<kDim>, kResidentAtHand<kDim>>;
  static constexpr bool kFinds = true, kLists = false, kOnce = true;

  const CodesParams& step;
  const DoubtUnit& unit;
  uint32_t own;
  const uint32_t* list = nullptr;  ///< if the unit is listed, the block's own pairs
  uint32_t listed = 0;             ///< how many pairs those are
  [[nodiscard]] __device__ uint32_t kv_head() const { return unit.kv_head; }
  [[nodiscard]] __device__ RowFinder finder(const HeadConstants& constants) const {
    return {step, unit, constants};
  }
  [[nodiscard]] __device__ uint32_t pairs(uint32_t end_block) const {
    return unit.is_listed ? listed : end_block * kBlockMaxima;
  }
  [[nodiscard]] __device__ uint32_t pair(uint32_t i) const { return unit.is_listed ? list[i] : i; }
  [[nodiscard]] __device__ float sign() const { return unit.is_listed ? -1.0F : 1.0F; }
  [[nodiscard]] __device__ uint32_t number() const { return unit.is_listed ? 0 : own; }
  [[nodiscard]] __device__ uint32_t count() const { return unit.is_listed ? 1 : unit.splits; }
  /// The step as the pass sees it has no splits of its own, so a place is one among all states.
  [[nodiscard]] __device__ uint32_t place() const { return static_cast<uint32_t>(unit.slot(own)); }
  [[nodiscard]] __device__ static uint32_t first_block() { return 0; }
  [[nodiscard]] __device__ static uint32_t end_block(const CodesParams& s) {
    return __ldcv(s.block_count);
  }
};

/// Writes `step`, the parameters of the pass in place of the step's, to shared memory; by the threads that a pass
/// has, between barriers. The queries are those that were saved. ring: that of the resident tokens before the step;
/// null: they have advanced.
template <int kDim>
__device__ inline void look_again(const CodesParams& s, uint32_t kv_head, RingState* ring,
                                  CodesParams& step) {
  constexpr uint32_t kThreads = kAttendWarps<kDim> * 32;  // of a larger block others have ended
  const auto* from = reinterpret_cast<const uint32_t*>(&s);
  auto* to = reinterpret_cast<uint32_t*>(&step);
  static_assert(sizeof(CodesParams) % 4 == 0);
  for (uint32_t i = threadIdx.x; i < sizeof(CodesParams) / 4; i += kThreads) to[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    step.splits = 0;
    step.stages = kFewestStages<kDim>;
    // The rows of a KV head lie in the order of the numbers in its group, as query_head() counts them.
    const uint32_t heads = s.group / s.tokens;
    float* const rows = s.doubt.queries + size_t{kv_head} * (s.group - heads) * s.shape.dim;
    step.q.data = reinterpret_cast<const std::byte*>(rows);
    step.q.head_stride = s.shape.dim;
    step.q.token_stride = static_cast<ptrdiff_t>(heads) * s.shape.dim;
    step.q.dtype = DType::f32;
    step.logits.scale = kLn2;  // the rows have the scale, and log2(e)
    if (ring != nullptr) {
      step.resident.states = ring - kv_head;
    } else if (s.resident.counts) {
      step.resident.counts = false;
      step.resident.k.data = nullptr;
    }
  }
  __syncthreads();
}

/// Adds the outcome of a KV head in doubt to the sums over all and clears its record; by one thread when all others
/// are done.
__device__ inline void close_record(const CodesParams& s, uint32_t kv_head) {
  DoubtBoard& board = *s.doubt.board;
  DoubtRecord& record = s.doubt.records[kv_head];
  const uint32_t eighth = __ldcv(s.block_count) * kCodeBlock / 8;
  uint32_t more = 0;
  // Where the host reads rows, heads are only counted.
  bool is_more = s.keys == nullptr && (__ldcg(&record.reasons) & DoubtRecord::kDoubted) != 0;
  bool gives_up = false;
  for (uint32_t part = 0; part < kDoubtParts; ++part) {
    uint32_t found = 0;  // in the last pass
    for (uint32_t pass = 0; pass < kDoubtPasses; ++pass) {
      const uint32_t now = __ldcg(&record.found[part][pass]);
      if (now != 0) found = now;
      record.found[part][pass] = record.falls[part][pass] = 0;
    }
    gives_up = gives_up || found > eighth;
    more = max(more, found);
  }
  is_more = is_more || more != 0;
  record.reasons = 0;
  const auto add = [](uint64_t& to, uint64_t x) {
    if (x != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), x);
  };
  add(board.doubted, is_more ? 1 : 0);
  add(board.given_up, gives_up ? 1 : 0);
  add(board.rows, more);
}

/// Whether the unit has nothing to do in its pass, because the log-sum-exps are the same as in the pass before.
__device__ inline bool rests(const CodesParams& s, const DoubtUnit& unit) {
  if (unit.pass == 0) return false;
  return __ldcg(&s.doubt.records[unit.kv_head].falls[unit.part][unit.pass - 1]) == 0;
}

}  // namespace keyhole::gpu::codes
