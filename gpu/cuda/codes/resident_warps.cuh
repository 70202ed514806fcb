// Sink and window for passes whose thread blocks have hundreds of resident rows each, as in a launch of many
// sessions, each of which has few thread blocks. ResidentShare (gpu/cuda/codes/resident_rows.cuh) takes a few
// microseconds for every 32 rows, mostly for barriers and trips to memory that wait for one another: little for 20
// rows, most of the time for 300. Here each warp has rows of its own, four under way at once, and states are merged
// at the end.
//
// The result is that of ResidentShare up to rounding.
#pragma once

#include "gpu/cuda/codes/resident_rows.cuh"

namespace keyhole::gpu::codes {

template <int kDim, int kHeadTiles>
class ResidentWarps {
 public:
  static_assert(kDim <= 128, "a lane has four components");
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  using Shared = ResidentShared<kDim, kHeads>;

  /// Asks for the first rows, as ResidentShare does.
  template <class Split>
  __device__ ResidentWarps(const CodesParams& s, uint32_t kv_head, uint32_t first_head,
                           const Split& split, Shared& shared)
      : s_(s), shared_(shared), kv_head_(kv_head), first_head_(first_head) {
    const StepParams& p = s.resident;
    const RingState before = p.states[kv_head];
    state_ = p.counts ? after_append(p, before) : before;
    tokens_ = state_.tokens();
    stored_ = tokens_ - (p.k.data != nullptr ? p.tokens : 0);
    next_ = split.number() * tokens_ / split.count();
    end_ = (split.number() + 1) * tokens_ / split.count();
  }

  /// Attends the share, as ResidentShare::attend() does.
  __device__ void attend(float value_scale) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // queries are there
    float4 q[kHeads];
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      q[h] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (is_inside()) q[h] = *reinterpret_cast<const float4*>(&shared_.rows[h][4 * lane]);
    }
    float4 o[kHeads] = {};
    float top[kHeadTiles], sum[kHeadTiles];  // of head lane % 4 of a tile
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      top[t] = kMinusInf;
      sum[t] = 0.0F;
    }
#pragma unroll 1
    for (uint32_t first = next_ + warp; first < end_; first += kAtOnce * kWarps) {
      float4 k[kAtOnce], v[kAtOnce];
      load(first, k, v);
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) add(first, t, k, v, q, o, top[t], sum[t]);
    }
    merge(value_scale, o, top, sum);
  }

 private:
  static constexpr uint32_t kWarps = kAttendWarps<kDim>;
  static constexpr uint32_t kAtOnce = 4;
  static_assert(2 * kWarps <= kResidentBytes<kDim> / 2, "shared.logits has two rows of each warp");
  static_assert(kWarps / 2 * 4 * sizeof(float) <= kResidentBytes<kDim>,
                "shared.keys has the states of half of the warps, of a tile");

  /// Whether the lane has components.
  [[nodiscard]] __device__ static bool is_inside() { return 4 * (threadIdx.x % 32) < kDim; }

  /// Loads rows first, first + kWarps, ...; zeros beyond the share.
  __device__ void load(uint32_t first, float4 (&k)[kAtOnce], float4 (&v)[kAtOnce]) const {
    const StepParams& p = s_.resident;
    const uint32_t lane = threadIdx.x % 32;
    const size_t plane = (size_t{p.ring.sink} + p.ring.capacity) * kDim;
    RawQuad raw_k[kAtOnce] = {}, raw_v[kAtOnce] = {};
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t row = first + i * kWarps;
      if (row >= end_ || !is_inside()) continue;
      if (row < stored_) {
        const size_t at =
            kv_head_ * 2 * plane + size_t{token_slot(p.ring, state_, row)} * kDim + 4 * lane;
        raw_k[i] = load_aligned(p.kv, p.dtype, at);
        raw_v[i] = load_aligned(p.kv, p.dtype, at + plane);
      } else {
        const uint32_t token = row - stored_;
        raw_k[i] = load_raw(p.k.data, p.k.dtype,
                            token * p.k.token_stride + kv_head_ * p.k.head_stride + 4 * lane);
        raw_v[i] = load_raw(p.v.data, p.v.dtype,
                            token * p.v.token_stride + kv_head_ * p.v.head_stride + 4 * lane);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      // The step's own tokens are attended in the precision in which they will be stored.
      const bool is_new = first + i * kWarps >= stored_;
      float x[4], y[4];
      convert(raw_k[i], is_new ? p.k.dtype : p.dtype, x);
      convert(raw_v[i], is_new ? p.v.dtype : p.dtype, y);
      if (is_new) {
        round_elements(p.dtype, x);
        round_elements(p.dtype, y);
      }
      k[i] = {x[0], x[1], x[2], x[3]};
      v[i] = {y[0], y[1], y[2], y[3]};
    }
  }

  /// Whether head h here belongs to a token that attends to resident token number `token`, as in ResidentShare.
  __device__ bool sees(uint32_t h, uint32_t token) const {
    const StepParams& p = s_.resident;
    const uint32_t first = tokens_ - p.drafts;
    if (p.drafts == 0 || token < first) return true;
    const uint32_t own = min((first_head_ + h) / (s_.group / s_.tokens), s_.tokens - 1);
    return (p.sees[own] >> (token - first) & 1U) != 0;
  }

  /// Adds the loaded rows to the sums of the heads of tile t.
  __device__ void add(uint32_t first, int t, const float4 (&k)[kAtOnce], const float4 (&v)[kAtOnce],
                      const float4 (&q)[kHeads], float4 (&o)[kHeads], float& top,
                      float& sum) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float cap = s_.logits.softcap * kLog2E;
    float weights[kAtOnce];
    float largest = top;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      float dots[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float4 a = q[4 * t + h];
        dots[h] = fmaf(a.x, k[i].x, fmaf(a.y, k[i].y, fmaf(a.z, k[i].z, a.w * k[i].w)));
      }
      float logit = sum_of_own_head(dots, lane);
      float slope;
      if (cap != 0.0F) logit = capped(logit, cap, slope);
      const uint32_t row = first + i * kWarps;
      const auto head = static_cast<uint32_t>(4 * t + lane % 4);
      weights[i] = row < end_ && sees(head, row) ? logit : kMinusInf;
      largest = fmaxf(largest, weights[i]);
    }
    const float base = finite_base(largest);
    const float keep = exp2_fast(top - base);
    top = largest;
    sum *= keep;
#pragma unroll
    for (float& w : weights) sum += w = exp2_fast(w - base);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      float4& own = o[4 * t + h];
      const float of_head = __shfl_sync(kWholeWarp, keep, h);
      own.x *= of_head, own.y *= of_head, own.z *= of_head, own.w *= of_head;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const float w = __shfl_sync(kWholeWarp, weights[i], h);
        own.x = fmaf(w, v[i].x, own.x), own.y = fmaf(w, v[i].y, own.y);
        own.z = fmaf(w, v[i].z, own.z), own.w = fmaf(w, v[i].w, own.w);
      }
    }
  }

  /// A warp's state of a head in shared memory, `[kDim]`, for one tile at a time.
  [[nodiscard]] __device__ float* state_of(uint32_t warp, uint32_t head_of_tile) const {
    std::byte* half = warp < kWarps / 2 ? shared_.keys : shared_.values;
    return reinterpret_cast<float*>(half) + (warp % (kWarps / 2) * 4 + head_of_tile) * kDim;
  }

  /// Leaves the share's state of every head where ResidentShare leaves it.
  __device__ void merge(float value_scale, const float4 (&o)[kHeads],
                        const float (&top)[kHeadTiles], const float (&sum)[kHeadTiles]) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float unit = __fdividef(1.0F, value_scale);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      if (lane < 4) {
        shared_.logits[warp][4 * t + lane] = top[t];
        shared_.logits[kWarps + warp][4 * t + lane] = sum[t];
      }
#pragma unroll
      for (uint32_t h = 0; h < 4; ++h) {
        if (is_inside()) *reinterpret_cast<float4*>(state_of(warp, h) + 4 * lane) = o[4 * t + h];
      }
      __syncthreads();
      if (warp < 4) {
        const uint32_t head = 4 * t + warp;
        float largest = kMinusInf, total = 0.0F;
        for (uint32_t w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared_.logits[w][head]);
        const float base = finite_base(largest);
        float x[kLaneParts<kDim>] = {};
#pragma unroll 1
        for (uint32_t w = 0; w < kWarps; ++w) {
          const float keep = exp2_fast(shared_.logits[w][head] - base);
          total = fmaf(keep, shared_.logits[kWarps + w][head], total);
          if (!is_inside()) continue;
          const float4 part = *reinterpret_cast<const float4*>(state_of(w, warp) + 4 * lane);
          x[0] = fmaf(keep, part.x, x[0]), x[1] = fmaf(keep, part.y, x[1]);
          x[2] = fmaf(keep, part.z, x[2]), x[3] = fmaf(keep, part.w, x[3]);
        }
        rotate_quads<kDim>(x, shared_.rows[head], static_cast<int>(lane), false);
        if (is_inside()) store_quads<kDim>(shared_.rows[head], static_cast<int>(lane), x, unit);
        if (lane == 0) {
          shared_.top[head] = largest;
          shared_.sum[head] = total;
        }
      }
      if (t + 1 < kHeadTiles)
        __syncthreads();  // the next tile's states take the place of this one's
    }
  }

  const CodesParams& s_;
  Shared& shared_;
  uint32_t kv_head_, first_head_;
  RingState state_;           ///< after the step
  uint32_t tokens_, stored_;  ///< stored: in K and V: all but the new ones, which are the last
  uint32_t next_, end_;
};

}  // namespace keyhole::gpu::codes
