// A group's queries as the tensor cores want them, and the logits of a tile of 16 rows by their codes. Both kernels
// of a step run the same instructions, so that both see the same bits.
//
//   scores   <q, u> in integers: keys' codes where they lie in their bytes (a mask, no shift) times q in two 8-bit
//            parts (15 bits, less where codes lie high), which are two columns of one product m16n8k32: 4 heads fill
//            its 8
//   logits   scale * log2(e) * (f <q, level> + <q, mean>) - noise, in fp32: a lane has 2 rows of one head. The noise
//            is taken up to kMostNoiseBias alone, as on the host
#pragma once

#include <cuda_fp16.h>

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/rotation.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Logarithms to 2^-22: absolutely for x between 1/2 and 2, relative to the result for others. The full functions are 25
/// instructions more, each of which comes from memory where it runs once.
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log_fast(float x) { return log2_fast(x) * kLn2; }
/// natural_weight() with weights below 2^-126 as zeros.
__device__ inline float weight_fast(float lse, float base) {
  return exp2_fast((lse - base) * kLog2E);
}

/// The codes of step `step` of a tile's keys, rows lane/4 + 8 r, as u times 2^key_shift(step).
template <int kBits, int kWords>
__device__ inline uint32_t key_register(const uint32_t (&words)[kWords], int step, int r) {
  constexpr int kPer = 8 / kBits;
  constexpr uint32_t kMask = kBits == 2 ? 0x03030303U : 0x0F0F0F0FU;
  if (step / kPer * 2 + r >= kWords) return 0;  // components beyond a head dimension of 80
  return words[step / kPer * 2 + r] & (kMask << (step % kPer * kBits));
}
template <int kBits>
__device__ inline int key_shift(int step) {
  return step % (8 / kBits) * kBits;
}

template <int kWords>
__device__ inline void load_words(const std::byte* tile, int lane, uint32_t (&words)[kWords]) {
  const auto* from = reinterpret_cast<const uint32_t*>(tile) + lane * kWords;
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from + i));
      words[i] = x.x;
      words[i + 1] = x.y;
      words[i + 2] = x.z;
      words[i + 3] = x.w;
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from + i));
      words[i] = x.x;
      words[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcs(from + i);
  }
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

__device__ inline float max_of_head(float x) {  // over the 8 lanes with the same lane % 4
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}
__device__ inline float sum_of_head(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

/// The sum over a warp of number lane % 4, returned in all lanes.
__device__ inline float sum_of_own_head(const float (&sums)[4], int lane) {
  // Each exchange halves the number of heads that a lane sums, until only its own is left.
  const bool odd = (lane & 1) != 0;
  const float a =
      (odd ? sums[1] : sums[0]) + __shfl_xor_sync(kWholeWarp, odd ? sums[0] : sums[1], 1);
  const float b =
      (odd ? sums[3] : sums[2]) + __shfl_xor_sync(kWholeWarp, odd ? sums[2] : sums[3], 1);
  const bool high = (lane & 2) != 0;
  return sum_of_head((high ? b : a) + __shfl_xor_sync(kWholeWarp, high ? a : b, 2));
}

/// Number of quads of components that a lane has of a row that a warp works on: quad u is components 128 u + 4 lane
/// .. + 3. It is one up to a dimension of 128, where some lanes may have none.
template <int kDim>
constexpr int kLaneQuads = (kDim + 127) / 128;
/// Number of components of a lane.
template <int kDim>
constexpr int kLaneParts = 4 * kLaneQuads<kDim>;

/// Rotates a row of which each lane of a warp has its quads, or back. `row` holds the same in shared memory, for
/// dimensions that are no power of 2, whose passes overlap.
template <int kDim>
__device__ inline void rotate_quads(float (&x)[kLaneParts<kDim>], float* row, int lane, bool back) {
  if constexpr ((kDim & (kDim - 1)) != 0) {
    static_assert(kDim <= 128, "a lane has one quad");
    if (4 * lane < kDim) *reinterpret_cast<float4*>(row + 4 * lane) = {x[0], x[1], x[2], x[3]};
    __syncwarp();
    rotate_in_shared(row, kDim, back);
    if (4 * lane < kDim) {
      const float4 y = *reinterpret_cast<const float4*>(row + 4 * lane);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
  } else {
    constexpr int kParts = kLaneParts<kDim>;
    float signs[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      signs[i] = code_sign(0, static_cast<uint32_t>(i / 4 * 128 + 4 * lane + i % 4));
      if (!back) x[i] *= signs[i];
    }
#pragma unroll
    for (int i = 0; i < kParts; i += 4) {
      const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
      const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
      x[i] = a + c, x[i + 1] = b + d, x[i + 2] = a - c, x[i + 3] = b - d;
    }
#pragma unroll
    for (int step = 1; step < kDim / kParts; step *= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float other = __shfl_xor_sync(kWholeWarp, x[i], step);
        x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
      }
    }
#pragma unroll
    for (int step = 4; step < kParts; step *= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if ((i & step) != 0) continue;
        const float a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
    }
    const float norm = rsqrtf(static_cast<float>(kDim));
#pragma unroll
    for (int i = 0; i < kParts; ++i) x[i] *= back ? norm * signs[i] : norm;
  }
}

/// Writes a lane's quads of a row, times `unit`, to shared memory.
template <int kDim>
__device__ inline void store_quads(float* row, int lane, const float (&x)[kLaneParts<kDim>],
                                   float unit) {
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    *reinterpret_cast<float4*>(row + 128 * u + 4 * lane) = {
        x[4 * u] * unit, x[4 * u + 1] * unit, x[4 * u + 2] * unit, x[4 * u + 3] * unit};
  }
}
__device__ inline void convert_quad(const RawQuad& raw, DType dtype, float* x) {
  float y[4];
  convert(raw, dtype, y);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = y[i];
}

/// The constants of a head's query that all tiles need.
struct HeadConstants {
  float slope;   ///< of the logit by <q, u>: 2 scale log2(e) * step of q
  float offset;  ///< of the logit at u = 0
  float noise;   ///< 0.5 scale^2 |q'|^2 log2(e)
};

/// The capped logit of a logit in base 2. cap: log2(e) times the soft-cap. `slope`: gets the derivative.
__device__ inline float capped(float logit, float cap, float& slope) {
  // Computes tanh by an exponential: an error of 2e-7, and five instructions in place of fifty.
  const float e = exp2_fast(2.0F * kLog2E * __fdividef(logit, cap));
  const float t = 1.0F - __fdividef(2.0F, 1.0F + e);
  slope = fmaf(-t, t, 1.0F);
  return cap * t;
}

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

/// Prepares a query by a warp, from x, a lane's quads as they came; logits: as in the step. row: gets it rotated, times scale
/// log2(e); `as_they_came` the same before it is rotated; `scale`: of the lane's channels. store(part, quad, word) keeps the four
/// bytes of quad `quad` of a lane of the high part (0) or the low one.
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

/// Prepares queries by kBlockWarps warps, by prepare_query(). store(h, part, quad, word): as there, of head h. heads: as in
/// RawQueries::load(), of steps with the same scale.
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

/// <row of head lane % 4, mean>, in all lanes; rows already have the logits' scale.
template <int kDim>
__device__ inline float mean_logit(const float (*rows)[kDim], const __half* mean, int lane) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kDim; i += 64) {
    const int j = i + 2 * lane;
    if (kDim % 64 != 0 && j >= kDim) break;
    const float2 m = __half22float2(*reinterpret_cast<const __half2*>(mean + j));
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float2 q = *reinterpret_cast<const float2*>(&rows[h][j]);
      sums[h] = fmaf(q.x, m.x, fmaf(q.y, m.y, sums[h]));
    }
  }
  return sum_of_own_head(sums, lane);
}

/// Products <q, u> of rows lane/4 and lane/4 + 8 of every tile, both parts of them, with heads 4 t + lane % 4. q: the
/// b registers. Several tiles go side by side, so that their products wait for results together.
template <int kDim, int kBits, int kHeadTiles, class Tile, int kTiles>
__device__ inline void tile_scores(const Tile (&tiles)[kTiles],
                                   const uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                   int (&scores)[kTiles][kHeadTiles][4]) {
#pragma unroll
  for (int step = 0; step < (kDim + 31) / 32; ++step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[r] = key_register<kBits>(tiles[i].keys, 2 * step + r / 2, r % 2);
      }
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        multiply_add_bytes(scores[i][t], a, q[t][step][0], q[t][step][1]);
      }
    }
  }
}

/// The number whose product with f is added to the logit of the block's mean. row: 0 or 1 of the lane's two.
__device__ inline float score_of_row(const int (&scores)[4], int row, const HeadConstants& head) {
  const int whole = scores[2 * row] * 128 + scores[2 * row + 1];
  return fmaf(static_cast<float>(whole), head.slope, head.offset);
}

/// Logits in base 2 of rows lane/4 (x) and lane/4 + 8 (y) of every tile, for head 4 t + lane % 4. middle: the logits
/// of the block's mean key; cap: log2(e) times the soft-cap.
template <int kHeadTiles, class Tile, int kTiles>
__device__ inline void weigh_scores(const Tile (&tiles)[kTiles],
                                    const int (&scores)[kTiles][kHeadTiles][4],
                                    const HeadConstants (&head)[kHeadTiles], float noise, float cap,
                                    const float (&middle)[kHeadTiles],
                                    float2 (&logits)[kTiles][kHeadTiles]) {
  constexpr float kMostBias = kMostNoiseBias * kLog2E;
  const auto product = [&](int i, int t, int row) {
    return score_of_row(scores[i][t], row, head[t]);
  };
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float f0 = __low2float(tiles[i].factors[0]), f1 = __low2float(tiles[i].factors[1]);
    const float square0 = f0 * f0, square1 = f1 * f1;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const float n = head[t].noise * noise, least = middle[t] - kMostBias;
      logits[i][t].x = fmaf(f0, product(i, t, 0), fmaxf(fmaf(-n, square0, middle[t]), least));
      logits[i][t].y = fmaf(f1, product(i, t, 1), fmaxf(fmaf(-n, square1, middle[t]), least));
    }
  }
  if (cap == 0.0F) return;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float f0 = __low2float(tiles[i].factors[0]), f1 = __low2float(tiles[i].factors[1]);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const float n = head[t].noise * noise;
      float slope;
      const float l0 = capped(fmaf(f0, product(i, t, 0), middle[t]), cap, slope);
      logits[i][t].x = l0 - fminf(n * slope * slope * (f0 * f0), kMostBias);
      const float l1 = capped(fmaf(f1, product(i, t, 1), middle[t]), cap, slope);
      logits[i][t].y = l1 - fminf(n * slope * slope * (f1 * f1), kMostBias);
    }
  }
}

/// Computes tile_scores() and weigh_scores() at once.
template <int kDim, int kBits, int kHeadTiles, class Tile, int kTiles>
__device__ inline void tile_logits(const Tile (&tiles)[kTiles],
                                   const uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                   const HeadConstants (&head)[kHeadTiles], float noise, float cap,
                                   const float (&middle)[kHeadTiles],
                                   float2 (&logits)[kTiles][kHeadTiles]) {
  int scores[kTiles][kHeadTiles][4] = {};
  tile_scores<kDim, kBits, kHeadTiles>(tiles, q, scores);
  weigh_scores<kHeadTiles>(tiles, scores, head, noise, cap, middle, logits);
}

/// The part of a tile of 16 rows that a lane holds.
template <int kDim, int kBits>
struct CodeTile {
  static constexpr CodeShape kShape{kDim, kBits, kBits};
  static constexpr int kKeyWords = static_cast<int>(kShape.key_words());
  static constexpr int kValueWords = static_cast<int>(kShape.value_words());
  uint32_t keys[kKeyWords];
  uint32_t values[kValueWords];
  __half2 factors[2];  ///< (f, g) of rows lane/4 and lane/4 + 8

  /// Loads keys and factors alone, of a tile of those that begin at `codes` and `their_factors`.
  __device__ void load_keys(const std::byte* codes, const std::byte* their_factors, int tile,
                            int lane) {
    load_words<kKeyWords>(codes + size_t{kCodeLanes} * kKeyWords * 4 * tile, lane, keys);
    const auto* from = reinterpret_cast<const __half2*>(their_factors) + kCodeTile * tile;
    factors[0] = from[lane / 4];
    factors[1] = from[lane / 4 + 8];
  }
};

}  // namespace keyhole::gpu::codes
