// Resident attention of one block over fp32 K and V, on the ordinary units: a session in fp32 wants exactness,
// and its twice as many bytes leave twice the time to compute.
#pragma once

#include "gpu/cuda/rings/share.cuh"

namespace keyhole::gpu {

/// Heads: the group, padded. A row lies across 32 lanes (16 for D = 64), 4 or 8 components in each. Own: as in
/// HalfShare.
template <int D, int Heads, uint32_t Own = kWarps>
struct FloatShare {
  static constexpr int kLanes = D == 64 ? 16 : 32;      ///< of a row
  static constexpr int kQuads = D > 128 ? D / 128 : 1;  ///< of 4 components, in a lane
  static constexpr int kRows = 32 / kLanes;             ///< rows that a warp has at once
  static constexpr int kStreams = static_cast<int>(Own) * kRows;
  static constexpr int kBatch = D > 256 ? 1 : D > 128 ? 2 : 4;  ///< rows that a lane has under way

  static constexpr size_t kFixedBytes = (Heads * D + 2 * D) * sizeof(float);
  static constexpr size_t kStageBytes = kStreams * Heads * (D + 4) * sizeof(float);  // the result

  __device__ static void run(const StepParams& p, std::byte* shared, int /*stages*/,
                             const Work& w) {
    __shared__ AttentionState states[kStreams * Heads];
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t part = lane % kLanes;
    const uint32_t stream = threadIdx.x / 32 * kRows + lane / kLanes;
    float* const q = reinterpret_cast<float*>(shared);
    float* const fresh = q + Heads * D;
    float* const result = reinterpret_cast<float*>(shared + kFixedBytes);

    for (uint32_t i = threadIdx.x * 4; i < Heads * D; i += kThreads * 4) {
      const uint32_t g = i / D;
      float x[4] = {};
      if (g < p.group) {
        const size_t at = (size_t{w.head} * p.group + g) * p.q.head_stride + i % D;
        convert(load_raw(p.q.data, p.q.dtype, at), p.q.dtype, x);
      }
      *reinterpret_cast<float4*>(q + i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    if (owns_new_token(w)) take_new_token<float, D>(p, w, fresh);
    __syncthreads();

    const size_t plane = plane_elements<float, D>(p);
    const float* k_rows = reinterpret_cast<const float*>(p.kv) + size_t{w.head} * 2 * plane;
    const float factor = logit_factor(p.logits);
    AttentionState state[Heads];
    float o[Heads][kQuads][4];
#pragma unroll
    for (int g = 0; g < Heads; ++g) {
      state[g] = AttentionState::empty();
#pragma unroll
      for (int i = 0; i < kQuads * 4; ++i) (&o[g][0][0])[i] = 0.0F;
    }

    const bool has_tiles = Own == kWarps || threadIdx.x / 32 < Own;
    const uint32_t first = has_tiles ? w.first + threadIdx.x / 32 : w.end;
    for (uint32_t tile = first; tile < w.end; tile += Own) {
      for (uint32_t row = lane / kLanes; row < kTile; row += kRows * kBatch) {
        float4 k[kBatch][kQuads], v[kBatch][kQuads];
        bool there[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t token = tile * kTile + row + b * kRows;
          there[b] = token < w.tokens && sees(p, w, token);
          const float* from = nullptr;
          const float* from_v = nullptr;
          if (token < w.stored) {
            from = k_rows + size_t{token_slot(p.ring, w.state, token)} * D;
            from_v = from + plane;
          } else if (there[b]) {
            from = fresh;
            from_v = fresh + D;
          }
#pragma unroll
          for (int i = 0; i < kQuads; ++i) {
            const uint32_t d = (part + i * kLanes) * 4;
            k[b][i] = v[b][i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
            if (!there[b] || d >= D) continue;
            k[b][i] = *reinterpret_cast<const float4*>(from + d);
            v[b][i] = *reinterpret_cast<const float4*>(from_v + d);
          }
        }
#pragma unroll
        for (int g = 0; g < Heads; ++g) {
          float x[kBatch];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) x[b] = 0.0F;
#pragma unroll
          for (int i = 0; i < kQuads; ++i) {
            const uint32_t d = (part + i * kLanes) * 4;
            if (d >= D) continue;
            const float4 y = *reinterpret_cast<const float4*>(q + g * D + d);
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
              x[b] += y.x * k[b][i].x + y.y * k[b][i].y + y.z * k[b][i].z + y.w * k[b][i].w;
            }
          }
          float largest = state[g].m;
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int offset = kLanes / 2; offset > 0; offset /= 2) {
              x[b] += __shfl_xor_sync(kWholeWarp, x[b], offset);
            }
            x[b] = there[b] ? logit_base2(x[b], factor, p.logits.softcap) : kMinusInf;
            largest = fmaxf(largest, x[b]);
          }
          const float scale = state[g].raise(largest);
          state[g].d *= scale;
#pragma unroll
          for (int i = 0; i < kQuads * 4; ++i) (&o[g][0][0])[i] *= scale;
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const float weight = state[g].weight(x[b]);
            state[g].d += weight;
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
              o[g][i][0] += weight * v[b][i].x;
              o[g][i][1] += weight * v[b][i].y;
              o[g][i][2] += weight * v[b][i].z;
              o[g][i][3] += weight * v[b][i].w;
            }
          }
        }
      }
    }

#pragma unroll
    for (int g = 0; g < Heads; ++g) {
      if (!has_tiles) break;
      if (part == 0) states[stream * Heads + g] = state[g];
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const uint32_t d = (part + i * kLanes) * 4;
        if (d < D) {
          *reinterpret_cast<float4*>(result + (stream * Heads + g) * (D + 4) + d) =
              make_float4(o[g][i][0], o[g][i][1], o[g][i][2], o[g][i][3]);
        }
      }
    }
    __syncthreads();
    write_partial<D, kStreams, Heads>(p, w, result, states);
  }
};

}  // namespace keyhole::gpu
