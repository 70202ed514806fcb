// Merges the heads of a cluster of thread blocks, each in one block: what the blocks have sent of the splits' sums and
// of the rows that were read (gpu/cuda/codes/finish.cuh).
//
// A warp merges a head by merge_head(). Of 256 components these are a thousand instructions, each of which runs once
// and comes from memory: there all threads of the block merge, with one component each.
#pragma once

#include <type_traits>

#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/codes/finish_shared.cuh"
#include "gpu/cuda/codes/list_reach.cuh"
#include "gpu/cuda/codes/merge_head.cuh"

namespace keyhole::gpu::codes {

/// Merges what blocks have sent for head `h`, by a warp: the codes without the rows that were read, and these rows.
/// has_rows: blocks have sent sums over rows. Returns what the question of doubt needs to know.
template <int kDim, int kBits, int kHeadTiles>
__device__ inline HeadSums gather_sent(uint32_t h, bool has_rows,
                                       const FinishShared<kDim, kBits, kHeadTiles>& shared,
                                       PartOfHead<kDim>& codes, PartOfHead<kDim>& exact) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own = h / kFinishBlocks;
  const bool inside = 4 * lane < kDim;
  const auto quad = [&](const float(&row)[kDim], int u) {
    return inside ? *reinterpret_cast<const float4*>(&row[128 * u + 4 * lane])
                  : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  };
  codes = {shared.top[h], shared.total[h], {}};
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    const float4 all = quad(shared.split_o[own], u);
    float* o = codes.o + 4 * u;
    o[0] = all.x, o[1] = all.y, o[2] = all.z, o[3] = all.w;
  }
  exact = {kMinusInf, 0.0F, {}};
  float coded_sum = 0.0F;
#pragma unroll
  for (uint32_t b = 0; b < kFinishBlocks; ++b) {
    if (!has_rows) break;
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      const float4 x = quad(shared.coded_o[b][own], u);
      float* o = codes.o + 4 * u;
      o[0] -= x.x, o[1] -= x.y, o[2] -= x.z, o[3] -= x.w;
    }
    codes.total -= shared.coded_sum[b][own];
    coded_sum += shared.coded_sum[b][own];
    exact.top = fmaxf(exact.top, shared.exact_max[b][own]);
  }
  const float base = finite_base(exact.top);
#pragma unroll
  for (uint32_t b = 0; b < kFinishBlocks; ++b) {
    if (!has_rows) break;
    const float weight = exp2_fast(shared.exact_max[b][own] - base);
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      const float4 x = quad(shared.exact_o[b][own], u);
      float* o = exact.o + 4 * u;
      o[0] = fmaf(weight, x.x, o[0]), o[1] = fmaf(weight, x.y, o[1]);
      o[2] = fmaf(weight, x.z, o[2]), o[3] = fmaf(weight, x.w, o[3]);
    }
    exact.total = fmaf(weight, shared.exact_sum[b][own], exact.total);
  }
  return {codes.top, codes.total, coded_sum, exact.top, exact.total, shared.lse[h], kMinusInf};
}

/// Stores one element, rounded to `dtype`.
__device__ inline void store_one(void* data, DType dtype, size_t at, float x) {
  switch (dtype) {
    case DType::f16: static_cast<__half*>(data)[at] = rounded_to<__half>(x); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(data)[at] = rounded_to<__nv_bfloat16>(x); break;
    default: static_cast<float*>(data)[at] = x;
  }
}

/// A head, of which a thread has one component.
template <int kDim, int kBits, int kHeadTiles>
class HeadOfBlock {
 public:
  using Shared = FinishShared<kDim, kBits, kHeadTiles>;
  static constexpr uint32_t kWarps = kDim / 32;  ///< of a head

  HeadSums sums;  ///< what the question of doubt needs to know
  /// own: the head's number among those of the block; one beyond the group is written nowhere. has_rows: as in
  /// gather_sent().
  __device__ void gather(const CodesParams& s, uint32_t rank, uint32_t own, bool has_rows,
                         const Shared& shared) {
    head_ = rank + own * kFinishBlocks;
    const uint32_t h = min(head_, s.group - 1), j = component();
    codes_ = shared.split_o[own][j];
    exact_ = 0.0F;
    sums = {shared.top[h], shared.total[h], 0.0F, kMinusInf, 0.0F, shared.lse[h], kMinusInf};
    if (!has_rows) return;
#pragma unroll 1
    for (uint32_t b = 0; b < kFinishBlocks; ++b) {
      codes_ -= shared.coded_o[b][own][j];
      sums.coded_sum += shared.coded_sum[b][own];
      sums.exact_top = fmaxf(sums.exact_top, shared.exact_max[b][own]);
    }
    sums.total -= sums.coded_sum;
    const float base = finite_base(sums.exact_top);
#pragma unroll 1
    for (uint32_t b = 0; b < kFinishBlocks; ++b) {
      const float weight = exp2_fast(shared.exact_max[b][own] - base);
      exact_ = fmaf(weight, shared.exact_o[b][own][j], exact_);
      sums.exact_total = fmaf(weight, shared.exact_sum[b][own], sums.exact_total);
    }
  }
  /// The head's number in the group.
  [[nodiscard]] __device__ uint32_t head() const { return head_; }
  [[nodiscard]] __device__ static uint32_t component() { return threadIdx.x % kDim; }

  /// Rotates codes back; scratch: `[kDim]` of the head in shared memory. By all threads of the block, with a barrier.
  __device__ void rotate(float* scratch) {
    const uint32_t lane = threadIdx.x % 32, j = component();
    float x = codes_;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const float other = __shfl_xor_sync(kWholeWarp, x, step);
      x = (lane & step) != 0 ? other - x : x + other;
    }
    scratch[j] = x;
    __syncthreads();
    float y[kWarps];
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) y[w] = scratch[32 * w + lane];
#pragma unroll
    for (uint32_t step = 1; step < kWarps; step *= 2) {
      const float sign = (j / 32 & step) != 0 ? -1.0F : 1.0F;
#pragma unroll
      for (uint32_t w = 0; w < kWarps; w += 2 * step) y[w] = fmaf(sign, y[w + step], y[w]);
    }
    codes_ = y[0];
    codes_ *= rsqrtf(static_cast<float>(kDim)) * code_sign(0, j);
  }
  /// Writes the head's output and log-sum-exp, as merge_head() does. resident_o: this component of the resident state;
  /// resident_lse: natural, -inf where there is none.
  __device__ void write(const CodesParams& s, uint32_t kv_head, float value_scale, float resident_o,
                        float resident_lse) const {
    if (head_ >= s.group) return;
    const float base = finite_base(fmaxf(sums.top, sums.exact_top));
    const float keep = exp2_fast(sums.top - base), weight = exp2_fast(sums.exact_top - base);
    const float total =
        fmaf(weight, sums.exact_total, (sums.total < 0.0F ? 0.0F : sums.total) * keep);
    const float inverse = total == 0.0F ? 0.0F : __fdividef(1.0F, total);
    float lse = total == 0.0F ? kMinusInf : (base + log2_fast(total)) * kLn2;
    float o = fmaf(weight, exact_, codes_ * (keep * value_scale)) * inverse;
    const auto merge = [&](float other_o, float other_lse) {
      const float natural = finite_base(fmaxf(lse, other_lse));
      const float a = weight_fast(lse, natural), b = weight_fast(other_lse, natural);
      const float sum = a + b;
      const float part = sum == 0.0F ? 0.0F : __fdividef(1.0F, sum);
      o = fmaf(a * part, o, b * part * other_o);
      lse = sum == 0.0F ? kMinusInf : natural + log_fast(sum);
    };
    if (s.resident_o != nullptr) merge(resident_o, resident_lse);
    const QueryHead head = query_head(s, kv_head, head_);
    if (s.sinks != nullptr) merge(0.0F, s.sinks[head.head]);
    const uint32_t j = component();
    store_one(s.out.data, s.out.dtype, row_at(s.out, head) + j, o);
    if (s.lse != nullptr && j == 0) {
      s.lse[head.token * (s.kv_heads * s.group / s.tokens) + head.head] = lse;
    }
  }

 private:
  uint32_t head_;
  float codes_, exact_;
};

/// The heads that a thread block merges by all its threads: side by side, or one after the other.
template <int kDim, int kBits, int kHeadTiles>
class MergeByBlock {
  using Shared = FinishShared<kDim, kBits, kHeadTiles>;
  static constexpr uint32_t kAtOnce = kFinishThreads / kDim;
  static constexpr uint32_t kOwn = Shared::kOwn, kRounds = (kOwn + kAtOnce - 1) / kAtOnce;
  static_assert(kAtOnce % kOwn == 0 || kAtOnce == 1,
                "threads that have no head of their own have a copy");

 public:
  __device__ explicit MergeByBlock(uint32_t rank) : rank_(rank) {}
  /// Asks for what kernels before this one have left of the heads.
  __device__ void load(const CodesParams& s, uint32_t kv_head, bool by_table) {
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      const uint32_t h = rank_ + own(i) * kFinishBlocks;
      reach_[i] = reach_of_lists(s, kv_head, by_table, h);
      resident_o_[i] = 0.0F;
      resident_lse_[i] = kMinusInf;
      if (s.resident_o == nullptr || h >= s.group) continue;
      const size_t at = size_t{kv_head} * s.group + h;
      resident_o_[i] = s.resident_o[at * kDim + threadIdx.x % kDim];
      resident_lse_[i] = s.resident_lse[at];
    }
  }
  __device__ void gather(const CodesParams& s, bool has_rows, const Shared& shared) {
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) heads_[i].gather(s, rank_, own(i), has_rows, shared);
  }
  /// Calls question(sums, own, reach) for each head, by one warp.
  template <class Question>
  __device__ void ask(const CodesParams& s, const Question& question) {
    // The last warp of a copy where there is one, of the head itself otherwise.
    const uint32_t part = threadIdx.x / kDim;
    const bool has_copy = kAtOnce >= 2 * kOwn;
    const bool is_last = threadIdx.x % kDim / 32 == kDim / 32 - 1;
    if (!is_last || (has_copy && part / kOwn != 1)) return;
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      if (heads_[i].head() >= s.group) continue;
      HeadSums sums =
          heads_[i].sums;  // a copy: the question may have it in memory, but not all of the head
      sums.resident_lse = resident_lse_[i];
      question(sums, own(i), reach_[i]);
    }
  }
  /// Writes outputs. The rows that were read are not needed any more.
  __device__ void write(const CodesParams& s, uint32_t kv_head, float value_scale, Shared& shared) {
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      heads_[i].rotate(shared.rows.coded_values[i * kAtOnce + threadIdx.x / kDim]);
      if (threadIdx.x / kDim >= kOwn) continue;
      heads_[i].write(s, kv_head, value_scale, resident_o_[i], resident_lse_[i]);
    }
  }
  /// Calls use(h, own, codes, exact) for each head, by a warp that has its parts; also behind write().
  template <class Use>
  __device__ void use_parts(const CodesParams& s, bool has_rows, const Shared& shared,
                            const Use& use) const {
    const uint32_t own = threadIdx.x / 32, h = rank_ + own * kFinishBlocks;
    if (own >= kOwn || h >= s.group) return;
    PartOfHead<kDim> codes, exact;
    static_cast<void>(gather_sent(h, has_rows, shared, codes, exact));
    use(h, own, codes, exact);
  }

 private:
  /// Number of the thread's head of a round among those of the block.
  [[nodiscard]] __device__ static uint32_t own(uint32_t round) {
    return kAtOnce == 1 ? round : threadIdx.x / kDim % kOwn;
  }

  uint32_t rank_;
  HeadOfBlock<kDim, kBits, kHeadTiles> heads_[kRounds];
  float reach_[kRounds], resident_o_[kRounds], resident_lse_[kRounds];
};

/// The same by warps, each of which has a head.
template <int kDim, int kBits, int kHeadTiles>
class MergeByWarps {
  using Shared = FinishShared<kDim, kBits, kHeadTiles>;

 public:
  __device__ explicit MergeByWarps(uint32_t rank)
      : own_(threadIdx.x / 32), head_(rank + own_ * kFinishBlocks) {}
  __device__ void load(const CodesParams& s, uint32_t kv_head, bool by_table) {
    reach_ = reach_of_lists(s, kv_head, by_table, head_);
    if (s.resident_o != nullptr && head_ < s.group) {
      resident_.load(s, size_t{kv_head} * s.group + head_);
    }
  }
  __device__ void gather(const CodesParams& s, bool has_rows, const Shared& shared) {
    if (!merges(s)) return;
    sums_ = gather_sent(head_, has_rows, shared, codes_, exact_);
  }
  template <class Question>
  __device__ void ask(const CodesParams& s, const Question& question) {
    if (!merges(s)) return;
    HeadSums sums = sums_;  // a copy, as in MergeByBlock
    sums.resident_lse = resident_.lse;
    question(sums, own_, reach_);
  }
  __device__ void write(const CodesParams& s, uint32_t kv_head, float value_scale, Shared& shared) {
    if (!merges(s)) return;
    merge_head<kDim>(s, kv_head, head_, codes_, exact_, value_scale, resident_,
                     shared.split_o[own_]);
  }
  template <class Use>
  __device__ void use_parts(const CodesParams& s, bool /*has_rows*/, const Shared& /*shared*/,
                            const Use& use) const {
    if (merges(s)) use(head_, own_, codes_, exact_);
  }

 private:
  [[nodiscard]] __device__ bool merges(const CodesParams& s) const {
    return own_ < Shared::kOwn && head_ < s.group;
  }

  uint32_t own_, head_;
  float reach_ = kMinusInf;
  ResidentHead<kDim> resident_;
  HeadSums sums_;
  PartOfHead<kDim> codes_, exact_;
};

template <int kDim, int kBits, int kHeadTiles>
using MergeSent = std::conditional_t<kDim == static_cast<int>(kFinishThreads),
                                     MergeByBlock<kDim, kBits, kHeadTiles>,
                                     MergeByWarps<kDim, kBits, kHeadTiles>>;

}  // namespace keyhole::gpu::codes
