// The rows that a second look at codes has found are read from where they lie and attended exactly. Each thread block
// has a share of them by their rank, whose state joins that of the codes in the same split.
#pragma once

#include "gpu/cuda/codes/exact_rows.cuh"
#include "gpu/cuda/codes/settle_find.cuh"

namespace keyhole::gpu::codes {

template <int kDim>
struct FoundShared {
  static constexpr uint32_t kWarps = kAttendWarps<kDim>;
  static constexpr uint32_t kListed = 1024;  ///< rows that are attended before others are listed
  alignas(16) float q[kDoubtHeads][kDim];    ///< times scale log2(e)
  alignas(16) float o[kWarps][kDoubtHeads][kDim];
  alignas(16) float row[kDoubtHeads][kDim];
  float top[kWarps][kDoubtHeads], sum[kWarps][kDoubtHeads];
  uint32_t list[kListed];
  uint32_t rows[kWarps];  ///< rows in a warp's words
};

/// Lists the found rows of ranks [first, end), at most kListed of them, between barriers. Threads have equal shares
/// of the words, in fours. before, own: the number of rows in the shares before this thread's, and in its own.
template <int kDim>
__device__ inline void list_found(const uint4* fours, uint32_t begin, uint32_t stop,
                                  uint32_t before, uint32_t own, uint32_t first, uint32_t end,
                                  FoundShared<kDim>& shared) {
  if (own == 0 || before >= end || before + own <= first) return;
  uint32_t rank = before;
  for (uint32_t i = begin; i < stop && rank < end; ++i) {
    const uint4 four = __ldcg(&fours[i]);
    const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      for (uint32_t bits = words[w]; bits != 0 && rank < end; bits &= bits - 1) {
        const uint32_t row = 32 * (4 * i + w) + __ffs(static_cast<int>(bits)) - 1;
        if (rank >= first) shared.list[rank - first] = row;
        ++rank;
      }
    }
  }
}

/// A warp's state of exact rows for four heads: o in a lane's quads; top and sum of head lane % 4.
template <int kDim>
class FoundRows {
 public:
  static constexpr uint32_t kQuads = kLaneQuads<kDim>;
  static constexpr uint32_t kAtOnce = kDim <= 128   ? 4
                                      : kDim <= 256 ? 2
                                                    : 1;  ///< rows that are asked for together

  /// Adds rows list[0 .. count), at most kAtOnce.
  __device__ void add(const CodesParams& s, uint32_t kv_head, const uint32_t* list, uint32_t count,
                      const float (&q)[kDoubtHeads][kDim]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool inside = 4 * lane < kDim;
    const float cap = s.logits.softcap * kLog2E;
    RawRow<kDim> raw[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (i < count) raw[i].load(s, kv_head, list[i], 0);
    }
    float weights[kAtOnce], largest = top_;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      float dots[kDoubtHeads] = {};
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        float k[4];
        convert_row(raw[i].key[u], s.dtype, k);
        if (!inside) continue;
#pragma unroll
        for (uint32_t h = 0; h < kDoubtHeads; ++h) {
          const float4 x = *reinterpret_cast<const float4*>(&q[h][128 * u + 4 * lane]);
          dots[h] = fmaf(x.x, k[0], fmaf(x.y, k[1], fmaf(x.z, k[2], fmaf(x.w, k[3], dots[h]))));
        }
      }
      const float dot = sum_of_own_head(dots, lane);
      float slope;
      weights[i] = i >= count ? kMinusInf : cap == 0.0F ? dot : capped(dot, cap, slope);
      largest = fmaxf(largest, weights[i]);
    }
    const float base = finite_base(largest);
    const float keep = exp2_fast(top_ - base);
    top_ = largest;
    sum_ *= keep;
#pragma unroll
    for (float& w : weights) sum_ += w = exp2_fast(w - base);
#pragma unroll
    for (uint32_t h = 0; h < kDoubtHeads; ++h) {
      const float of_head = __shfl_sync(kWholeWarp, keep, static_cast<int>(h));
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        o_[h][u].x *= of_head, o_[h][u].y *= of_head, o_[h][u].z *= of_head, o_[h][u].w *= of_head;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (i >= count) break;
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        float v[4];
        convert_row(raw[i].value[u], s.dtype, v);
#pragma unroll
        for (uint32_t h = 0; h < kDoubtHeads; ++h) {
          const float w = __shfl_sync(kWholeWarp, weights[i], static_cast<int>(h));
          float4& o = o_[h][u];
          o.x = fmaf(w, v[0], o.x), o.y = fmaf(w, v[1], o.y);
          o.z = fmaf(w, v[2], o.z), o.w = fmaf(w, v[3], o.w);
        }
      }
    }
  }

  __device__ void store(FoundShared<kDim>& shared) const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < kDoubtHeads) {
      shared.top[warp][lane] = top_;
      shared.sum[warp][lane] = sum_;
    }
#pragma unroll
    for (uint32_t h = 0; h < kDoubtHeads; ++h) {
#pragma unroll
      for (uint32_t u = 0; u < kQuads; ++u) {
        if (4 * lane >= kDim) continue;
        *reinterpret_cast<float4*>(&shared.o[warp][h][128 * u + 4 * lane]) = o_[h][u];
      }
    }
  }

 private:
  float4 o_[kDoubtHeads][kQuads] = {};
  float top_ = kMinusInf, sum_ = 0.0F;
};

/// Joins the warps' states of head `h` of the part into the split's state of that head, by a warp. The pass sums
/// values rotated, in units of the head's value scale.
template <int kDim>
__device__ inline void join_split(const CodesParams& s, const DoubtUnit& unit, uint32_t split,
                                  uint32_t h, FoundShared<kDim>& shared) {
  const uint32_t lane = threadIdx.x % 32;
  const size_t slot = unit.slot(split) * s.group + kDoubtHeads * unit.part + h;
  float largest = kMinusInf;
#pragma unroll
  for (uint32_t w = 0; w < shared.kWarps; ++w) largest = fmaxf(largest, shared.top[w][h]);
  const float2 coded = __ldcg(&s.part_sum[slot]);
  const float top = fmaxf(largest, coded.x), base = finite_base(top);
  const float of_coded = exp2_fast(coded.x - base);
  float x[kLaneParts<kDim>] = {};
  float sum = 0.0F;
#pragma unroll 1
  for (uint32_t w = 0; w < shared.kWarps; ++w) {
    const float keep = exp2_fast(shared.top[w][h] - base);
    sum = fmaf(keep, shared.sum[w][h], sum);
#pragma unroll
    for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
      if (4 * lane >= kDim) continue;
      const float4 o = *reinterpret_cast<const float4*>(&shared.o[w][h][128 * u + 4 * lane]);
      float* quad = x + 4 * u;
      quad[0] = fmaf(keep, o.x, quad[0]), quad[1] = fmaf(keep, o.y, quad[1]);
      quad[2] = fmaf(keep, o.z, quad[2]), quad[3] = fmaf(keep, o.w, quad[3]);
    }
  }
  rotate_quads<kDim>(x, shared.row[h], static_cast<int>(lane), false);
  const float unit_of_codes = __fdividef(1.0F, value_scale_of(s, unit.kv_head));
#pragma unroll
  for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
    if (4 * lane >= kDim) continue;
    auto* to = reinterpret_cast<float4*>(s.part_o + slot * kDim) + 32 * u + lane;
    const float4 o = __ldcg(to);
    const float* quad = x + 4 * u;
    *to = {
        fmaf(of_coded, o.x, quad[0] * unit_of_codes), fmaf(of_coded, o.y, quad[1] * unit_of_codes),
        fmaf(of_coded, o.z, quad[2] * unit_of_codes), fmaf(of_coded, o.w, quad[3] * unit_of_codes)};
  }
  if (lane == 0) s.part_sum[slot] = make_float2(top, fmaf(of_coded, coded.y, sum));
}

/// Reads a split's share of the rows that the pass has found; by the whole thread block.
template <int kDim>
__device__ inline void read_found(const CodesParams& s, const DoubtUnit& unit, uint32_t split,
                                  FoundShared<kDim>& shared) {
  constexpr uint32_t kWarps = FoundShared<kDim>::kWarps, kThreads = kWarps * 32;
  constexpr uint32_t kAtOnce = FoundRows<kDim>::kAtOnce;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DoubtRecord& record = s.doubt.records[unit.kv_head];
  const uint64_t all = __ldcg(&record.found[unit.part][unit.pass]) +
                       (unit.is_listed ? 0U : __ldcg(&record.chosen_count));
  const auto first = static_cast<uint32_t>(all * split / unit.splits);
  const auto end = static_cast<uint32_t>(all * (split + 1) / unit.splits);
  if (first == end) return;
  const uint32_t count = min(s.group - kDoubtHeads * unit.part, kDoubtHeads);
  const float* const queries =
      s.doubt.queries + (size_t{unit.kv_head} * s.group + kDoubtHeads * unit.part) * kDim;
  for (uint32_t i = threadIdx.x; i < kDoubtHeads * kDim; i += kThreads) {
    shared.q[i / kDim][i % kDim] = i / kDim < count ? queries[i] : 0.0F;
  }
  // The number of rows in the words before this thread's. A block has 8 words.
  const auto* const fours = reinterpret_cast<const uint4*>(unit.found(s));
  const uint32_t four_count = __ldcv(s.block_count) * (kBlockMaxima / 4);
  const uint32_t share = (four_count + kThreads - 1) / kThreads;
  const uint32_t begin_four = min(threadIdx.x * share, four_count);
  const uint32_t end_four = min(begin_four + share, four_count);
  uint32_t own = 0;
#pragma unroll 4
  for (uint32_t i = begin_four; i < end_four; ++i) {
    const uint4 four = __ldcg(&fours[i]);
    own += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
  }
  uint32_t before = own;
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kWholeWarp, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.rows[warp] = before;
  before -= own;
  __syncthreads();
  for (uint32_t w = 0; w < warp; ++w) before += shared.rows[w];

  FoundRows<kDim> rows;
#pragma unroll 1
  for (uint32_t at = first; at < end; at += shared.kListed) {
    const uint32_t stop = min(end, at + shared.kListed);
    list_found(fours, begin_four, end_four, before, own, at, stop, shared);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = warp * kAtOnce; i < stop - at; i += kWarps * kAtOnce) {
      rows.add(s, unit.kv_head, shared.list + i, min(stop - at - i, kAtOnce), shared.q);
    }
    __syncthreads();
  }
  rows.store(shared);
  __syncthreads();
  if (warp < count) join_split(s, unit, split, warp, shared);
}

}  // namespace keyhole::gpu::codes
