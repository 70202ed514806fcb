// What the blocks of the resident attention have in common for all dtypes: which tokens a block attends, the step's
// new token, and the partial state that a block leaves.
#pragma once

#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

inline constexpr uint32_t kWarps = 4;
inline constexpr uint32_t kThreads = 32 * kWarps;
inline constexpr uint32_t kTile = 16;  ///< tokens that a warp attends at once
inline constexpr uint32_t kLeastTiles = 4;

/// The work of one block of one KV head. A token's number is its place in the layer, sink first.
struct Work {
  RingState state;  ///< after the step
  uint32_t tokens;  ///< of the layer, with the new one
  uint32_t
      stored;  ///< of those, in K and V when the kernel starts: all but the new one, which is the last
  uint32_t head;
  uint32_t split;
  uint32_t active;      ///< splits that have work
  uint32_t first, end;  ///< the block's tiles
};

__device__ inline Work work_of(const StepParams& p, const RingState& state, uint32_t head,
                               uint32_t split) {
  Work w{};
  w.state = state;
  w.tokens = state.tokens();
  w.stored = w.tokens - (p.k.data != nullptr ? 1 : 0);
  w.head = head;
  w.split = split;
  const uint32_t tiles = (w.tokens + kTile - 1) / kTile;
  // A block for every kWarps tiles while there are blocks, so that short windows are loaded all at once; beyond,
  // equal shares.
  w.active = min(p.splits, max(1U, (tiles + kLeastTiles - 1) / kLeastTiles));
  const uint32_t each = tiles / w.active;
  const uint32_t more = tiles % w.active;  // the first blocks take one more
  w.first = split * each + min(split, more);
  w.end = w.first + each + (split < more ? 1 : 0);
  return w;
}

/// Whether the step attends to token number `token`, one of w.tokens: not to drafts of other branches.
__device__ inline bool sees(const StepParams& p, const Work& w, uint32_t token) {
  if (p.drafts == 0 || token + p.drafts < w.tokens) return true;
  return (p.sees[0] >> (token + p.drafts - w.tokens) & 1U) != 0;
}

/// True for the block that attends the step's new token.
__device__ inline bool owns_new_token(const Work& w) {
  return w.stored < w.tokens && w.split == w.active - 1;
}

/// Bytes from one (KV head, K or V) to the next.
template <class T, int D>
__device__ inline size_t plane_elements(const StepParams& p) {
  return (size_t{p.ring.sink} + p.ring.capacity) * D;
}

/// 16 bytes of a row of T, as they come from the caller's rows.
template <class T>
struct RawPiece {
  RawQuad quads[4 / sizeof(T)];
};
/// piece < D * sizeof(T) / 16.
template <class T>
__device__ inline RawPiece<T> load_piece(const TensorView& rows, uint32_t head, uint32_t piece) {
  RawPiece<T> raw;
#pragma unroll
  for (uint32_t i = 0; i < 4 / sizeof(T); ++i) {
    raw.quads[i] =
        load_raw(rows.data, rows.dtype, head * rows.head_stride + piece * (16 / sizeof(T)) + i * 4);
  }
  return raw;
}
/// The piece, rounded to the session's dtype.
template <class T>
__device__ inline uint4 rounded_piece(const RawPiece<T>& raw, DType from) {
  union {
    uint4 bytes;
    T elements[16 / sizeof(T)];
  } out;
#pragma unroll
  for (uint32_t i = 0; i < 4 / sizeof(T); ++i) {
    float x[4];
    convert(raw.quads[i], from, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) out.elements[i * 4 + j] = rounded_to<T>(x[j]);
  }
  return out.bytes;
}

/// The block's share of the new token: 64 threads write k, 64 v, both to where a later step reads them and to
/// shared memory, `[2, D]`. A barrier must follow.
template <class T, int D>
__device__ inline void take_new_token(const StepParams& p, const Work& w, T* kept) {
  constexpr uint32_t kPieces = D * sizeof(T) / 16;
  const uint32_t which = threadIdx.x / 64;
  const TensorView& rows = which == 0 ? p.k : p.v;
  const uint32_t slot = token_slot(p.ring, w.state, w.tokens - 1);
  T* plane = reinterpret_cast<T*>(p.kv) + (size_t{w.head} * 2 + which) * plane_elements<T, D>(p);
#pragma unroll
  for (uint32_t first = 0; first < kPieces; first += 64) {
    const uint32_t piece = first + threadIdx.x % 64;
    if (piece >= kPieces) break;
    const uint4 bytes = rounded_piece<T>(load_piece<T>(rows, w.head, piece), rows.dtype);
    reinterpret_cast<uint4*>(plane + size_t{slot} * D)[piece] = bytes;
    reinterpret_cast<uint4*>(kept + which * D)[piece] = bytes;
  }
}

/// Logit in units of ln 2, from the product of q and k with `factor` = scale (times log2 e where there is no cap).
__device__ inline float logit_base2(float product, float factor, float softcap) {
  const float x = product * factor;
  return softcap > 0.0F ? softcap * tanhf(x / softcap) * kLog2E : x;
}
__device__ inline float logit_factor(const LogitParams& logits) {
  return logits.softcap > 0.0F ? logits.scale : logits.scale * kLog2E;
}

/// Merges the states of the block's streams (warps, or parts of warps): numerators o `[Streams, Heads, D + 4]` and
/// states `[Streams, Heads]`, both in shared memory behind a barrier. Writes partial_o `[group, D]`, still numerators,
/// and partial_states `[group]` of the split. Base 2.
template <int D, int Streams, int Heads>
__device__ inline void write_partial(const StepParams& p, const Work& w, const float* o,
                                     const AttentionState* states) {
  const size_t row = (size_t{w.head} * p.splits + w.split) * p.group;
  for (uint32_t i = threadIdx.x; i < p.group * (D / 4); i += kThreads) {
    const uint32_t g = i / (D / 4);
    const uint32_t d = (i % (D / 4)) * 4;
    AttentionState all = AttentionState::empty();
#pragma unroll
    for (int s = 0; s < Streams; ++s) all.m = fmaxf(all.m, states[s * Heads + g].m);
    float4 total = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
    for (int s = 0; s < Streams; ++s) {
      const AttentionState part = states[s * Heads + g];
      const float weight = all.weight(part.m);
      const float4 x = *reinterpret_cast<const float4*>(o + (s * Heads + g) * (D + 4) + d);
      all.d += weight * part.d;
      total.x += weight * x.x;
      total.y += weight * x.y;
      total.z += weight * x.z;
      total.w += weight * x.w;
    }
    *reinterpret_cast<float4*>(p.partial_o + (row + g) * D + d) = total;
    if (d == 0) p.partial_states[row + g] = all;
  }
}

}  // namespace keyhole::gpu
