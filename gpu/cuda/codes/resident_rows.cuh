// Sink and window, attended in the pass over the codes: each of its thread blocks has an equal share of them, some 20
// rows of 640, and leaves their state with its own. A kernel of their own would take 9 us in front of the pass; here
// they are done while the first codes are on their way.
//
// Rows are attended exactly, in fp32. The pass sums values in the rotated space in units of the head's value scale,
// and the share's sum is brought there, too: both maps are linear, so what follows the pass need not know of resident
// tokens.
#pragma once

#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/ring.h"

namespace keyhole::gpu::codes {

/// The layer's state including the step's tokens.
__device__ inline RingState after_append(const StepParams& p, const RingState& before) {
  const bool appends = p.k.data != nullptr;
  return p.tokens == 1 || !appends ? after_step(p.ring, before, appends)
                                   : after_tokens(p.ring, before, p.tokens);
}

/// Bytes, for each component, of the rows that a thread block has at hand at once: 32 rows of 16 bits or 16 of 32
/// bits; half as many rows of 256 components, and a quarter of 512.
template <int kDim>
constexpr uint32_t kResidentBytes = kDim <= 128   ? 64
                                    : kDim <= 256 ? 32
                                                  : 16;

/// kBytes: as kResidentBytes.
template <int kDim, int kHeads, uint32_t kBytes = kResidentBytes<kDim>>
struct ResidentShared {
  /// First the queries as they came, times scale log2(e); then the share's sums, rotated and divided by the value
  /// scale.
  alignas(16) float rows[kHeads][kDim];
  alignas(16) std::byte keys[kBytes * kDim];
  alignas(16) std::byte values[kBytes * kDim];
  float logits[kBytes / 2][kHeads];  ///< then weights
  float top[kHeads], sum[kHeads];    ///< of the share, base 2
  float keep[kHeads];                ///< what the rows at hand multiply sums before them with
};

/// Reads four components of a row in shared memory, `[kDim]` of the session's dtype.
template <int kDim>
__device__ inline float4 quad_of(const std::byte* rows, DType dtype, uint32_t row, uint32_t quad) {
  if (dtype == DType::f32) return reinterpret_cast<const float4*>(rows)[row * (kDim / 4) + quad];
  const uint2 x = reinterpret_cast<const uint2*>(rows)[row * (kDim / 4) + quad];
  float y[4];
  convert(RawQuad{{x.x, x.y, 0, 0}}, dtype, y);
  return {y[0], y[1], y[2], y[3]};
}

/// The rows of a thread block's share on their way to shared memory, by kWarps warps. Shared has `keys` and `values`
/// of kBytes bytes for each component.
template <int kDim, uint32_t kWarps, uint32_t kBytes, class Shared>
class ResidentRows {
 protected:
  /// first_head: the group's head that is number 0 here.
  __device__ ResidentRows(const CodesParams& s, uint32_t kv_head, uint32_t first_head,
                          Shared& shared)
      : s_(s), shared_(shared), kv_head_(kv_head), first_head_(first_head) {}

  /// Finds the rows of the share. split: whose it is.
  template <class Split>
  __device__ void divide(const Split& split) {
    const StepParams& p = s_.resident;
    const RingState before = p.states[kv_head_];
    state_ = p.counts ? after_append(p, before) : before;
    const uint32_t tokens = state_.tokens();
    stored_ = tokens - (p.k.data != nullptr ? p.tokens : 0);
    next_ = split.number() * tokens / split.count();
    end_ = (split.number() + 1) * tokens / split.count();
  }

  /// Loads rows next_ .. next_ + count_ - 1, each by a warp.
  __device__ void load() {
    const StepParams& p = s_.resident;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t element = s_.resident.dtype == DType::f32 ? 4 : 2;
    const uint32_t row_bytes = kDim * element, pieces = row_bytes / 16;
    const size_t plane = (size_t{p.ring.sink} + p.ring.capacity) * row_bytes;
    const std::byte* const keys = p.kv + size_t{kv_head_} * 2 * plane;
    count_ = min(end_ - next_, kBytes / element);
#pragma unroll 1
    for (uint32_t row = warp; row < count_; row += kWarps) {
      if (next_ + row >= stored_) {
        take_new(row);
        continue;
      }
      const std::byte* from = keys + size_t{token_slot(p.ring, state_, next_ + row)} * row_bytes;
#pragma unroll 1
      for (uint32_t i = lane; i < 2 * pieces; i += 32) {
        const bool value = i >= pieces;
        const uint32_t at = (value ? i - pieces : i) * 16;
        std::byte* to = (value ? shared_.values : shared_.keys) + row * row_bytes + at;
        copy_async(shared_address(to), from + (value ? plane : 0) + at, true);
      }
    }
    commit_copies();
  }
  /// Whether head h here belongs to a token that attends to resident token number `token`.
  __device__ bool sees(uint32_t h, uint32_t token) const {
    const StepParams& p = s_.resident;
    const uint32_t first = state_.tokens() - p.drafts;
    if (p.drafts == 0 || token < first) return true;
    const uint32_t own = min((first_head_ + h) / (s_.group / s_.tokens), s_.tokens - 1);
    return (p.sees[own] >> (token - first) & 1U) != 0;
  }

  const CodesParams& s_;
  Shared& shared_;
  uint32_t kv_head_, first_head_;
  RingState state_;  ///< after the step
  uint32_t stored_;  ///< tokens in K and V: all but the new ones, which are the last
  uint32_t next_, end_, count_;

 private:
  /// Takes one of the step's own tokens, by a warp.
  __device__ void take_new(uint32_t row) {
    const StepParams& p = s_.resident;
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32; i < kDim / 2; i += 32) {
      const bool value = i >= kDim / 4;
      const TensorView& rows = value ? p.v : p.k;
      const uint32_t at = (value ? i - kDim / 4 : i) * 4;
      float x[4];
      const size_t from = (next_ + row - stored_) * rows.token_stride + kv_head_ * rows.head_stride;
      convert(load_raw(rows.data, rows.dtype, from + at), rows.dtype, x);
      store_elements(value ? shared_.values : shared_.keys, s_.resident.dtype, row * kDim + at, x);
    }
  }
};

/// The share of a thread block of attend_codes(). Code that runs once is slow, because each of its instructions comes
/// from memory: so loops are not unrolled here, and rows go to shared memory as they are.
template <int kDim, int kHeadTiles, uint32_t kWarps = kAttendWarps<kDim>,
          uint32_t kBytes = kResidentBytes<kDim>>
class ResidentShare
    : private ResidentRows<kDim, kWarps, kBytes, ResidentShared<kDim, 4 * kHeadTiles, kBytes>> {
 public:
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  static constexpr uint32_t kQuads = kLaneQuads<kDim>;
  using Shared = ResidentShared<kDim, kHeads, kBytes>;

  /// Asks for the first rows. first_head: the group's head that is number 0 here. split: whose share it is.
  template <class Split>
  __device__ ResidentShare(const CodesParams& s, uint32_t kv_head, uint32_t first_head,
                           const Split& split, Shared& shared)
      : Rows(s, kv_head, first_head, shared) {
    divide(split);
    load();
    // A warp reads and writes these of its own heads.
    const uint32_t h = threadIdx.x / 32 + threadIdx.x % 32 * kWarps;
    if (h < kHeads) {
      shared.top[h] = kMinusInf;
      shared.sum[h] = 0.0F;
    }
  }

  /// Attends the share once queries are in shared.rows, for which the caller needs no barrier; leaves the state in
  /// `shared`.
  __device__ void attend(float value_scale) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    while (true) {
      wait_for_copies<0>();
      __syncthreads();
      take_logits();
      __syncthreads();
      add();
      next_ += count_;
      if (next_ >= end_) break;
      __syncthreads();
      load();
    }
    const float unit = __fdividef(1.0F, value_scale);
    if constexpr (kOwn == 1) {
      rotate(warp, sums_[0], unit);
    } else {
      // The rows are free now, and by way of them one loop is enough for all heads.
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t h = warp + static_cast<uint32_t>(i) * kWarps;
        if (4 * lane < kDim && is_head(h)) {
          store_quads<kDim>(shared_.rows[h], static_cast<int>(lane), sums_[i], 1.0F);
        }
      }
#pragma unroll 1
      for (uint32_t h = warp; h < kHeads; h += kWarps) {
        float x[kLaneParts<kDim>] = {};
#pragma unroll
        for (uint32_t u = 0; u < kQuads; ++u) {
          if (4 * lane >= kDim) continue;
          const float4 y = *reinterpret_cast<const float4*>(&shared_.rows[h][128 * u + 4 * lane]);
          x[4 * u] = y.x, x[4 * u + 1] = y.y, x[4 * u + 2] = y.z, x[4 * u + 3] = y.w;
        }
        rotate(h, x, unit);
      }
    }
  }

 private:
  using Rows = ResidentRows<kDim, kWarps, kBytes, Shared>;
  using Rows::count_;
  using Rows::divide;
  using Rows::end_;
  using Rows::load;
  using Rows::next_;
  using Rows::s_;
  using Rows::sees;
  using Rows::shared_;

  static constexpr int kOwn = (kHeads + kWarps - 1) / kWarps;  ///< heads of a warp
  /// Whether there is head h, one of a warp's kOwn.
  [[nodiscard]] __device__ static constexpr bool is_head(uint32_t h) {
    return kOwn == 1 || kHeads % kWarps == 0 || h < kHeads;
  }

  /// Leaves the sums of head h in its row, by a warp: x, rotated, times `unit`.
  __device__ void rotate(uint32_t h, float (&x)[kLaneParts<kDim>], float unit) {
    if (h >= kHeads) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    rotate_quads<kDim>(x, shared_.rows[h], lane, false);
    if (4 * lane < kDim) store_quads<kDim>(shared_.rows[h], lane, x, unit);
  }

  /// A warp has every kWarps-th row, and multiplies up to kTogether of them with a head at once: a head's query is
  /// read from shared memory for all of them.
  __device__ void take_logits() {
    static constexpr uint32_t kTogether = kHeadTiles <= 2 ? 1 : kDim <= 128 ? 4 : 2;
    const uint32_t lane = threadIdx.x % 32;
    const float cap = s_.logits.softcap * kLog2E;
#pragma unroll 1
    for (uint32_t first = threadIdx.x / 32; first < count_; first += kTogether * kWarps) {
      float4 k[kTogether][kQuads];
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        // A row that is not there is the first one once more.
        const uint32_t row = first + r * kWarps < count_ ? first + r * kWarps : first;
#pragma unroll
        for (uint32_t u = 0; u < kQuads; ++u) {
          k[r][u] = {0.0F, 0.0F, 0.0F, 0.0F};
          if (4 * lane < kDim) {
            k[r][u] = quad_of<kDim>(shared_.keys, s_.resident.dtype, row, 32 * u + lane);
          }
        }
      }
      constexpr int kUnroll = kTogether == 1 ? kHeadTiles : 1;
#pragma unroll kUnroll
      for (int t = 0; t < kHeadTiles; ++t) {
        float dots[kTogether][4];
#pragma unroll
        for (int h = 0; h < 4; ++h) {
#pragma unroll
          for (uint32_t u = 0; u < kQuads; ++u) {
            // Lanes beyond the head dimension read what is there, and multiply it by 0.
            const uint32_t at = 4 * lane < kDim ? 128 * u + 4 * lane : 0;
            const float4 q = *reinterpret_cast<const float4*>(&shared_.rows[4 * t + h][at]);
#pragma unroll
            for (uint32_t r = 0; r < kTogether; ++r) {
              const float4 x = k[r][u];
              const float last = u == 0 ? q.w * x.w : fmaf(q.w, x.w, dots[r][h]);
              dots[r][h] = fmaf(q.x, x.x, fmaf(q.y, x.y, fmaf(q.z, x.z, last)));
            }
          }
        }
#pragma unroll
        for (uint32_t r = 0; r < kTogether; ++r) {
          const uint32_t row = first + r * kWarps;
          if (row >= count_) break;
          const float dot = sum_of_own_head(dots[r], static_cast<int>(lane));
          float slope;
          if (lane < 4) {
            const float logit = cap == 0.0F ? dot : capped(dot, cap, slope);
            shared_.logits[row][4 * t + lane] = sees(4 * t + lane, next_ + row) ? logit : kMinusInf;
          }
        }
      }
    }
  }

  /// Adds the rows at hand to the sums of a warp's heads, of all of them together.
  __device__ void add() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= kHeads) return;
#pragma unroll 1
    for (uint32_t h = warp; h < kHeads; h += kWarps) {
      const float logit = lane < count_ ? shared_.logits[lane][h] : kMinusInf;
      const float before = shared_.top[h], top = fmaxf(before, warp_max(logit));
      const float base = finite_base(top);
      const float weight = exp2_fast(logit - base), keep = exp2_fast(before - base);
      const float sum = warp_sum(weight);
      if (lane < count_) shared_.logits[lane][h] = weight;
      if (lane == 0) {
        shared_.top[h] = top;
        shared_.sum[h] = fmaf(shared_.sum[h], keep, sum);
        shared_.keep[h] = keep;
      }
    }
    __syncwarp();
    // A head that is not there is the warp's first once more.
    const auto head = [&](int i) {
      const uint32_t h = warp + static_cast<uint32_t>(i) * kWarps;
      return is_head(h) ? h : warp;
    };
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float keep = shared_.keep[head(i)];
#pragma unroll
      for (float& x : sums_[i]) x *= keep;
    }
#pragma unroll 2
    for (uint32_t row = 0; row < count_; ++row) {
      float4 v[kQuads];
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        v[u] = quad_of<kDim>(shared_.values, s_.resident.dtype, row,
                             4 * lane < kDim ? 32 * u + lane : 0);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float w = shared_.logits[row][head(i)];
#pragma unroll
        for (uint32_t u = 0; u < kQuads; ++u) {
          float* o = sums_[i] + 4 * u;
          o[0] = fmaf(w, v[u].x, o[0]), o[1] = fmaf(w, v[u].y, o[1]);
          o[2] = fmaf(w, v[u].z, o[2]), o[3] = fmaf(w, v[u].w, o[3]);
        }
      }
    }
  }

  float sums_[kOwn][kLaneParts<kDim>] = {};
};

}  // namespace keyhole::gpu::codes
