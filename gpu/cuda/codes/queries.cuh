// A group's queries as the tensor cores want them: rotated, and in integers of 15 bits, less where codes lie high in
// their bytes.
#pragma once

#include <cuda_fp16.h>

#include "gpu/cuda/codes/code_math.cuh"
#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/codes/warp_rows.cuh"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

/// The codes of step `step` of a tile's keys are multiplied where they lie: they are codes times 2^key_shift(step).
template <int kBits>
__device__ inline int key_shift(int step) {
  return step % (8 / kBits) * kBits;
}

/// A query head of a step: the token it belongs to, and its number in the model.
struct QueryHead {
  uint32_t token, head;
};
/// Query head number h of a KV head's group. A group has the heads of one token, or of several, token by token.
__device__ inline QueryHead query_head(const CodesParams& s, uint32_t kv_head, uint32_t h) {
  if (s.tokens == 1) return {0, kv_head * s.group + h};
  const uint32_t heads = s.group / s.tokens, token = h / heads;
  return {token, kv_head * heads + h - token * heads};
}
/// Where the head's row begins, in elements.
template <class Rows>
__device__ inline size_t row_at(const Rows& rows, const QueryHead& q) {
  return q.token * rows.token_stride + q.head * rows.head_stride;
}

/// The divisor of a head's values; 0 where the head has had no block yet.
__device__ inline float value_scale_of(const CodesParams& s, uint32_t kv_head) {
  const float scale = s.value_scale[kv_head];
  return scale > 0.0F ? scale : 1.0F;
}

/// The constants of a head's query that all tiles need.
struct HeadConstants {
  float slope;   ///< of the logit by <q, u>: 2 scale log2(e) * step of q
  float offset;  ///< of the logit at u = 0
  float noise;   ///< 0.5 scale^2 |q'|^2 log2(e)
};

/// The heads that a thread block works on, in tiles of 4. Here all are heads of one step, from `first` on in its
/// groups.
struct StepHeads {
  const CodesParams& s;
  uint32_t first = 0, padded = 0;

  static constexpr bool kHasResident =
      true;  ///< the block attends resident tokens, too, if its step does
  __device__ const CodesParams& step(int) const { return s; }
  /// The number, in its step's group, of the first head of a tile.
  __device__ uint32_t head(int tile) const { return first + 4 * static_cast<uint32_t>(tile); }
  __device__ bool has(uint32_t h) const { return first + h < s.group; }
  /// Number of heads for which every 32 rows of a step have maxima.
  __device__ uint32_t maxima() const { return padded; }
};

/// A warp's queries of a group as they lie in memory: of kBlockWarps warps, warp w has heads w, w + kBlockWarps, ..
/// They are asked for ahead of all else, because everything needs them: kAhead of them, and each other one when there
/// is a place for it.
template <int kDim, int kHeads, int kBlockWarps,
          int kAhead = (kHeads + kBlockWarps - 1) / kBlockWarps>
struct RawQueries {
  static constexpr int kOwn = (kHeads + kBlockWarps - 1) / kBlockWarps;
  static_assert(kAhead == kOwn || kAhead == 1);
  RawQuad q[kAhead][kLaneQuads<kDim>] = {};
  float scale[kLaneParts<kDim>];  ///< of the head's channels
  uint32_t kv_head = 0;

  template <class Heads>
  __device__ void load(const Heads& heads, uint32_t of_kv_head) {
    kv_head = of_kv_head;
    const float* const key_scale = heads.step(0).key_scale;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (float& x : scale) x = 1.0F;
    if (4 * lane >= kDim) return;
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      const size_t at = size_t{kv_head} * kDim + 128 * u + 4 * lane;
      const float4 x = *reinterpret_cast<const float4*>(key_scale + at);
      scale[4 * u] = x.x, scale[4 * u + 1] = x.y, scale[4 * u + 2] = x.z, scale[4 * u + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_head(heads, warp + static_cast<uint32_t>(i) * kBlockWarps, q[i]);
    }
  }
  /// Loads head h, if the group has one.
  template <class Heads>
  __device__ void load_head(const Heads& heads, uint32_t h, RawQuad (&to)[kLaneQuads<kDim>]) const {
    const uint32_t lane = threadIdx.x % 32;
    if (4 * lane >= kDim || h >= kHeads || !heads.has(h)) return;
    const CodesParams& s = heads.step(h / 4);
    const QueryHead head = query_head(s, kv_head, heads.head(h / 4) + h % 4);
    const size_t at = row_at(s.q, head) + size_t(4) * lane;
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) to[u] = load_raw(s.q.data, s.q.dtype, at + 128 * u);
  }
};

/// Prepares a query by a warp, from x, a lane's quads as they came; logits: as in the step. row: gets it rotated, times
/// scale log2(e); `as_they_came` the same before it is rotated; `scale`: of the lane's channels. store(part, quad,
/// word) keeps the four bytes of quad `quad` of a lane of the high part (0) or the low one.
template <int kDim, int kBits, class Store>
__device__ __forceinline__ void prepare_query(const LogitParams& logits,
                                              float (&x)[kLaneParts<kDim>],
                                              const float (&scale)[kLaneParts<kDim>], float* row,
                                              HeadConstants& constants, float* as_they_came,
                                              const Store& store) {
  constexpr int kSteps = (kDim + 31) / 32, kParts = kLaneParts<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float unit = logits.scale * kLog2E;
  const bool inside = 4 * lane < kDim;
  if (inside) store_quads<kDim>(as_they_came, lane, x, unit);
    // An approximate division is good to 2 units in the last place; a full one is a function of 40 instructions.
#pragma unroll
  for (int i = 0; i < kParts; ++i) x[i] = __fdividef(x[i], scale[i]);
  rotate_quads<kDim>(x, row, lane, false);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (!inside) x[i] = 0.0F;
  }
  float square = 0.0F, largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    square = fmaf(x[i], x[i], square);
    largest = fmaxf(largest, fabsf(x[i]));
  }
  largest = warp_max(largest);
  square = warp_sum(square);
  // The unit for 127 * 128: the high part has 8 bits, and 7 bits are below it.
  const float step = largest > 0.0F ? largest * (1.0F / 16256.0F) : 1.0F;
  // The shift is the same for all quads of a lane: 8 steps of 16 components lie between them, a multiple of the
  // steps of a word.
  const int shift = key_shift<kBits>(lane / 4);
  const float inverse = __fdividef(__int_as_float((127 - shift) << 23), step);
  uint32_t high[kLaneQuads<kDim>] = {}, low[kLaneQuads<kDim>] = {};
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int y = __float2int_rn(x[i] * inverse);
    const int upper = (y + 64) >> 7;
    high[i / 4] |= (static_cast<uint32_t>(upper) & 0xFFU) << (8 * (i % 4));
    low[i / 4] |= (static_cast<uint32_t>(y - upper * 128) & 0xFFU) << (8 * (i % 4));
    sum += y << shift;
  }
  sum = __reduce_add_sync(kWholeWarp, sum);
  if (lane < kSteps * 8) {
#pragma unroll
    for (int u = 0; u < kLaneQuads<kDim>; ++u) {
      store(0, u, high[u]);
      store(1, u, low[u]);
    }
  }
  if (inside) store_quads<kDim>(row, lane, x, unit);
  if (lane == 0) {
    constants = {2.0F * unit * step,
                 -unit * step * static_cast<float>((1 << kBits) - 1) * static_cast<float>(sum),
                 0.5F * logits.scale * logits.scale * square * kLog2E};
  }
}

/// Prepares queries by kBlockWarps warps, by prepare_query(). store(h, part, quad, word): as there, of head h. heads:
/// as in RawQueries::load(), of steps with the same scale.
template <int kDim, int kBits, int kHeads, int kBlockWarps, int kAhead, class Heads, class Store>
__device__ __forceinline__ void prepare_queries(const Heads& heads,
                                                RawQueries<kDim, kHeads, kBlockWarps, kAhead>& raw,
                                                float (*rows)[kDim], HeadConstants* constants,
                                                float (*as_they_came)[kDim], const Store& store) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool inside = 4 * lane < kDim;
  // prepare(h, raw): of head h. Where queries come one at a time, the next is on its way meanwhile.
  const auto prepare = [&](int h, RawQuad(&quads)[kLaneQuads<kDim>]) {
    float x[kLaneParts<kDim>] = {};
    if (inside && heads.has(static_cast<uint32_t>(h))) {
      const DType dtype = heads.step(h / 4).q.dtype;
#pragma unroll
      for (int u = 0; u < kLaneQuads<kDim>; ++u) convert_quad(quads[u], dtype, &x[4 * u]);
    }
    if constexpr (kAhead != raw.kOwn) {
      raw.load_head(heads, static_cast<uint32_t>(h + kBlockWarps), quads);
    }
    prepare_query<kDim, kBits>(
        heads.step(0).logits, x, raw.scale, rows[h], constants[h], as_they_came[h],
        [&](int part, int quad, uint32_t word) { store(h, part, quad, word); });
  };
  if constexpr (kAhead != raw.kOwn) {
#pragma unroll 1
    for (int h = warp; h < kHeads; h += kBlockWarps) prepare(h, raw.q[0]);
  } else {
#pragma unroll
    for (int own = 0; own < raw.kOwn; ++own) {
      if (warp + own * kBlockWarps < kHeads) prepare(warp + own * kBlockWarps, raw.q[own]);
    }
  }
}

template <int kDim, int kBits, int kHeadTiles>
struct SharedQueries {
  static constexpr int kSteps = (kDim + 31) / 32;  // products
  static constexpr int kHeads = 4 * kHeadTiles;
  alignas(16) int8_t parts[2 * kHeads][kSteps * 32];
  alignas(16) float rows[kHeads][kDim];  ///< times scale log2(e)
  HeadConstants constants[kHeads];

  /// Prepares the queries by kBlockWarps warps. `as_they_came` `[kHeads][kDim]` gets the same rows before they are
  /// rotated. heads: as in load(), of steps with the same scale.
  template <class Heads, int kBlockWarps, int kAhead>
  __device__ void prepare(const Heads& heads, RawQueries<kDim, kHeads, kBlockWarps, kAhead>& raw,
                          float (*as_they_came)[kDim]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    prepare_queries<kDim, kBits>(heads, raw, rows, constants, as_they_came,
                                 [&](int h, int part, int quad, uint32_t word) {
                                   int8_t* to = &parts[2 * h + part][128 * quad + 4 * lane];
                                   *reinterpret_cast<uint32_t*>(to) = word;
                                 });
  }
};

/// Loads the b registers of the products for a lane, and the constants of its heads 4 t + lane % 4.
template <int kDim, int kBits, int kHeadTiles>
__device__ inline void load_products(const SharedQueries<kDim, kBits, kHeadTiles>& queries,
                                     int lane, uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                     HeadConstants (&head)[kHeadTiles]) {
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
    for (int step = 0; step < (kDim + 31) / 32; ++step) {
      const int8_t* column = queries.parts[8 * t + lane / 4] + 32 * step + lane % 4 * 4;
      q[t][step][0] = *reinterpret_cast<const uint32_t*>(column);
      q[t][step][1] = *reinterpret_cast<const uint32_t*>(column + 16);
    }
    head[t] = queries.constants[4 * t + lane % 4];
  }
}

}  // namespace keyhole::gpu::codes
