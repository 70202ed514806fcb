// The second look at the codes of a KV head in doubt: the pass of gpu/cuda/codes/attend.cuh, which here finds the
// rows that may weigh, leaves them out of its sums, and leaves a bit for each.
//
// A row is found if its logit by code and kDoubtDeviations standard deviations of its error reach the log-sum-exp
// less the limit's `light` in one of the heads, if the step chose it before, or if its block has kUnknownNoise. So
// what is found depends on nothing but the row, and no list of rows needs space, or an order.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/attend.cuh"

namespace keyhole::gpu::codes {

static_assert(kMaximumRows == 32, "a pair of tiles has a word of bits");

/// A part of a KV head's group in a pass of a step.
struct DoubtUnit {
  uint32_t kv_head;
  uint32_t first;   ///< place of its first split's state among those of the step
  uint32_t part;    ///< heads kDoubtHeads * part and those behind it
  uint32_t pass;    ///< of kDoubtPasses
  uint32_t splits;  ///< that its rows are divided into

  /// A bit for each row, in the place of the maxima of the step's first pass.
  [[nodiscard]] __device__ uint32_t* found(const CodesParams& s) const {
    const uint32_t words = s.block_capacity * kBlockMaxima;
    const uint32_t heads = s.group <= 4 ? 4 : s.group <= 8 ? 8 : 16;  // of the maxima
    return reinterpret_cast<uint32_t*>(s.maxima) + (size_t{kv_head} * heads + part) * words;
  }
  [[nodiscard]] __device__ size_t slot(uint32_t split) const { return size_t{first} + split; }
};

/// Bits 0, 4, .. 28 of a word, side by side.
__device__ inline uint32_t every_fourth_bit(uint32_t x) {
  x &= 0x11111111U;
  x = (x | x >> 3U) & 0x03030303U;
  x = (x | x >> 6U) & 0x000F000FU;
  return (x | x >> 12U) & 0xFFU;
}

/// A warp's.
class RowFinder {
 public:
  static constexpr bool kFinds = true;

  __device__ RowFinder(const CodesParams& s, const DoubtUnit& unit, const HeadConstants& constants)
      : record_(s.doubt.records[unit.kv_head]), unit_(unit), words_(unit.found(s)) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t head = kDoubtHeads * unit.part + lane % 4;
    const float cap = s.logits.softcap * kLog2E;
    const float light = doubt_limits(s.shape).light * kLog2E;
    // Of a product, base 2, for f^2 noise = 1.
    deviations_ = kDoubtDeviations * sqrtf(2.0F * kLog2E * constants.noise);
    bound_ = head >= s.group ? -kMinusInf
             : unit.pass == kDoubtPasses - 1
                 ? kMinusInf
                 : uncapped_logit(__ldcg(&record_.lse[head]) - light, cap);
    const uint32_t chosen = __ldcg(&record_.chosen_count);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t number = lane + 32 * i;
      chosen_[i] = number < chosen ? __ldcg(&record_.chosen[number]) : ~0U;
    }
  }

  /// Of the 32 rows of pair number `pair`. scores: of the tiles, and middle: of the block's mean, for the lane's head.
  template <class Tile>
  __device__ void find(uint32_t pair, const Tile (&tiles)[2], const int (&scores)[2][1][4],
                       const HeadConstants& head, float noise, float middle,
                       float2 (&logits)[2][1]) {
    const uint32_t lane = threadIdx.x % 32;
    const float far = deviations_ * sqrtf(noise);
    const bool is_unknown = noise >= kUnknownNoise;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 factors = tiles[i / 2].factors[i % 2];
      const float f = __low2float(factors);
      const float product = fmaf(f, score_of_row(scores[i / 2][0], i % 2, head), middle);
      uint32_t heads = __ballot_sync(kWholeWarp, fmaf(far, f, product) > bound_);
      // A row's four lanes are side by side.
      heads |= heads >> 1U;
      heads |= heads >> 2U;
      found |= every_fourth_bit(heads) << (8 * i);
    }
    if (is_unknown || bound_ == kMinusInf) found = ~0U;
    found =
        __reduce_or_sync(kWholeWarp, found | bit_of(chosen_[0], pair) | bit_of(chosen_[1], pair));
    if (lane == 0) words_[pair] = found;
    if (found == 0) return;
    count_ += __popc(found);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = 16 * i + lane / 4;
      if ((found >> row & 1U) != 0) logits[i][0].x = kMinusInf;
      if ((found >> (row + 8) & 1U) != 0) logits[i][0].y = kMinusInf;
    }
  }

  /// Once all pairs were looked at.
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
  float deviations_, bound_;
  uint32_t chosen_[2];
  uint32_t count_ = 0;
};

/// The split of a thread block in a second look.
struct DoubtSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentShare<kDim, kHeadTiles>;

  const CodesParams& step;
  const DoubtUnit& unit;
  uint32_t own;
  [[nodiscard]] __device__ uint32_t kv_head() const { return unit.kv_head; }
  [[nodiscard]] __device__ RowFinder finder(const HeadConstants& constants) const {
    return {step, unit, constants};
  }
  [[nodiscard]] __device__ uint32_t number() const { return own; }
  [[nodiscard]] __device__ uint32_t count() const { return unit.splits; }
  /// The step as the pass sees it has no splits of its own: places are those among all.
  [[nodiscard]] __device__ uint32_t place() const { return static_cast<uint32_t>(unit.slot(own)); }
  [[nodiscard]] __device__ static uint32_t first_block() { return 0; }
  [[nodiscard]] __device__ static uint32_t end_block(const CodesParams& s) {
    return __ldcv(s.block_count);
  }
};

/// What the pass is told in the place of the step, `step`, in shared memory, by the threads that a pass has, between
/// barriers. Queries are those that were saved. ring: of the resident tokens before the step; null: they have
/// advanced.
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
    step.stages = kLeastStages;
    // Rows of a KV head lie by the numbers of its group, as query_head() counts them.
    const uint32_t heads = s.group / s.tokens;
    float* const rows = s.doubt.queries + size_t{kv_head} * (s.group - heads) * s.shape.dim;
    step.q = {rows, s.shape.dim, DType::f32, size_t{heads} * s.shape.dim};
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

/// Adds what has become of a KV head in doubt to the sums of all, and clears its record, by one thread when all
/// others are done.
__device__ inline void close_record(const CodesParams& s, uint32_t kv_head) {
  DoubtBoard& board = *s.doubt.board;
  DoubtRecord& record = s.doubt.records[kv_head];
  const uint32_t eighth = __ldcv(s.block_count) * kCodeBlock / 8;
  const uint32_t chosen = __ldcg(&record.chosen_count);
  uint32_t more = 0;
  // Where the host reads rows heads are counted alone.
  bool is_more = s.keys == nullptr && (__ldcg(&record.reasons) & DoubtRecord::kDoubted) != 0;
  bool gives_up = false;
  for (uint32_t part = 0; part < kDoubtParts; ++part) {
    uint32_t found = 0;  // in the last pass
    for (uint32_t pass = 0; pass < kDoubtPasses; ++pass) {
      const uint32_t now = __ldcg(&record.found[part][pass]);
      if (now != 0) found = now;
      record.found[part][pass] = record.falls[part][pass] = 0;
    }
    if (found <= chosen) continue;
    gives_up = gives_up || found > eighth;
    more = max(more, found - chosen);
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

__device__ inline uint32_t doubt_parts(const CodesParams& s) {
  return (s.group + kDoubtHeads - 1) / kDoubtHeads;
}
/// Whether the unit has nothing to do in its pass: the log-sum-exps are what they were in the pass before.
__device__ inline bool rests(const CodesParams& s, const DoubtUnit& unit) {
  if (unit.pass == 0) return false;
  return __ldcg(&s.doubt.records[unit.kv_head].falls[unit.part][unit.pass - 1]) == 0;
}

}  // namespace keyhole::gpu::codes
