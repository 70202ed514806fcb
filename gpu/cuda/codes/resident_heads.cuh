// Sink and window for passes of many query rows: as ResidentShare (gpu/cuda/codes/resident_rows.cuh), whose warps
// divide rows for the logits and query rows for the sums, and wait for each other between. At 24 query rows that takes
// 10 us for 20 rows, most of it for queries, which each warp reads from shared memory for each of its rows. Here a
// warp has query rows of its own from the logits to the state, in registers: it reads all rows at hand, and waits for
// no other warp.
#pragma once

#include "gpu/cuda/codes/resident_rows.cuh"

namespace keyhole::gpu::codes {

/// kBytes: for each component, of the rows at hand, as kResidentBytes; no more than 32 rows of 16 bits.
template <int kDim, int kHeads, uint32_t kBytes>
struct ResidentHeadsShared {
  static_assert(kBytes >= 4 && kBytes <= 64 && kBytes % 4 == 0);
  /// First the queries as they came, times scale log2(e); then the share's sums.
  alignas(16) float rows[kHeads][kDim];
  alignas(16) std::byte keys[kBytes * kDim];
  alignas(16) std::byte values[kBytes * kDim];
  alignas(16) float weights[kHeads][32];  ///< of the rows at hand
};

template <int kDim, int kHeads, uint32_t kWarps, uint32_t kBytes>
class ResidentHeads
    : private ResidentRows<kDim, kWarps, kBytes, ResidentHeadsShared<kDim, kHeads, kBytes>> {
 public:
  using Shared = ResidentHeadsShared<kDim, kHeads, kBytes>;

  __device__ ResidentHeads(const CodesParams& s, uint32_t kv_head, Shared& shared)
      : Rows(s, kv_head, 0, shared) {}

  /// Asks for the first rows, of a step that has resident tokens. split: whose share it is.
  template <class Split>
  __device__ void begin(const Split& split) {
    divide(split);
    load();
  }

  /// Attends the share, once queries are in shared.rows, those of head h by warp h % kWarps. put(h, x, top, sum) is
  /// called by each warp once for each of its heads: x, a lane's quads of the share's sums, rotated and divided by the
  /// value scale; the maximum in base 2 and the sum of the weights.
  template <class Put>
  __device__ void attend(float value_scale, const Put& put) {
    float sums[kOwn][kLaneParts<kDim>] = {};
    float top[kOwn], sum[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      top[i] = kMinusInf;
      sum[i] = 0.0F;
    }
    while (true) {
      wait_for_copies<0>();
      __syncthreads();
      switch (s_.resident.dtype) {
        case DType::f16: add<DType::f16>(sums, top, sum); break;
        case DType::bf16: add<DType::bf16>(sums, top, sum); break;
        default: add<DType::f32>(sums, top, sum);
      }
      next_ += count_;
      if (next_ >= end_) break;
      __syncthreads();
      load();
    }
    // The rows are free now, and by way of them one loop is enough for all heads.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float own_top = kMinusInf, own_sum = 0.0F;  // of the warp's head number `lane`
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (is_head(i) && 4 * lane < kDim) {
        store_quads<kDim>(shared_.rows[head(i)], lane, sums[i], 1.0F);
      }
      if (lane == i) own_top = top[i], own_sum = sum[i];
    }
    const float unit = __fdividef(1.0F, value_scale);
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      if (!is_head(i)) break;
      float x[kLaneParts<kDim>] = {};
      if (4 * lane < kDim) load_quads(shared_.rows[head(i)], x);
      rotate_quads<kDim>(x, shared_.rows[head(i)], lane, false);
#pragma unroll
      for (float& e : x) e *= unit;
      put(head(i), x, __shfl_sync(kWholeWarp, own_top, i), __shfl_sync(kWholeWarp, own_sum, i));
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

  static constexpr int kOwn = (kHeads + static_cast<int>(kWarps) - 1) / static_cast<int>(kWarps);
  static constexpr int kQuads = kLaneQuads<kDim>;

  /// The warp's head number i; where it has not so many, its first one.
  [[nodiscard]] __device__ static int head(int i) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return is_head(i) ? warp + i * static_cast<int>(kWarps) : warp;
  }
  [[nodiscard]] __device__ static bool is_head(int i) {
    return kHeads % kWarps == 0 ||
           static_cast<int>(threadIdx.x) / 32 + i * static_cast<int>(kWarps) < kHeads;
  }
  __device__ static void load_quads(const float* row, float (&x)[kLaneParts<kDim>]) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const float4 y = *reinterpret_cast<const float4*>(row + 128 * u + 4 * lane);
      x[4 * u] = y.x, x[4 * u + 1] = y.y, x[4 * u + 2] = y.z, x[4 * u + 3] = y.w;
    }
  }

  /// Adds the rows at hand, of dtype kType, to the sums of the warp's heads.
  template <DType kType>
  __device__ __forceinline__ void add(float (&sums)[kOwn][kLaneParts<kDim>], float (&top)[kOwn],
                                      float (&sum)[kOwn]) {
    const uint32_t lane = threadIdx.x % 32;
    const bool inside = 4 * lane < kDim;
    // Four rows at once; a row that is not there is the first one once more. A lane without components reads what is
    // there, and multiplies it by 0.
    const auto quad = [&](const std::byte* rows, uint32_t row, int u) {
      return quad_of<kDim>(rows, kType, row < count_ ? row : 0, inside ? 32 * u + lane : 0);
    };
    float logits[kOwn];  // of row `lane`
#pragma unroll
    for (float& x : logits) x = kMinusInf;
#pragma unroll 1
    for (uint32_t first = 0; first < count_; first += 4) {
      float4 k[4][kQuads];
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
        for (int u = 0; u < kQuads; ++u) k[r][u] = quad(shared_.keys, first + r, u);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float q[kLaneParts<kDim>] = {}, dots[4];
        if (inside) load_quads(shared_.rows[head(i)], q);
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
          for (int u = 0; u < kQuads; ++u) {
            const float4 x = k[r][u];
            const float last = u == 0 ? q[3] * x.w : fmaf(q[4 * u + 3], x.w, dots[r]);
            dots[r] = fmaf(q[4 * u], x.x, fmaf(q[4 * u + 1], x.y, fmaf(q[4 * u + 2], x.z, last)));
          }
        }
        const float dot = sum_of_own_head(dots, static_cast<int>(lane));
        if (lane / 4 == first / 4) logits[i] = dot;
      }
    }
    const float cap = s_.logits.softcap * kLog2E;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float slope, logit = cap == 0.0F ? logits[i] : capped(logits[i], cap, slope);
      if (lane >= count_ || !sees(static_cast<uint32_t>(head(i)), next_ + lane)) logit = kMinusInf;
      const float before = top[i];
      top[i] = fmaxf(before, warp_max(logit));
      const float base = finite_base(top[i]), keep = exp2_fast(before - base);
      const float weight = exp2_fast(logit - base);
      if (is_head(i)) shared_.weights[head(i)][lane] = weight;
      sum[i] = fmaf(sum[i], keep, warp_sum(weight));
#pragma unroll
      for (float& x : sums[i]) x *= keep;
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t first = 0; first < count_; first += 4) {
      float4 v[4][kQuads];
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
        for (int u = 0; u < kQuads; ++u) v[r][u] = quad(shared_.values, first + r, u);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float4 w = *reinterpret_cast<const float4*>(&shared_.weights[head(i)][first]);
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
          const float own = r == 0 ? w.x : r == 1 ? w.y : r == 2 ? w.z : w.w;
#pragma unroll
          for (int u = 0; u < kQuads; ++u) {
            float* const o = sums[i] + 4 * u;
            o[0] = fmaf(own, v[r][u].x, o[0]), o[1] = fmaf(own, v[r][u].y, o[1]);
            o[2] = fmaf(own, v[r][u].z, o[2]), o[3] = fmaf(own, v[r][u].w, o[3]);
          }
        }
      }
    }
    __syncwarp();  // the next rows' weights take the place of these
  }
};

}  // namespace keyhole::gpu::codes
