// Resident attention of one block over 16-bit K and V, on tensor cores.
//
// Each warp goes through tiles of 16 tokens of its own, copied ahead of use into its own part of shared
// memory: no barrier between warps until the end. Logits are in units of ln 2. With the tokens as rows, the 8 columns
// of a product hold the heads of the group, so a K or V row is read once for all of them and 1 or 5 heads cost what 8
// do:
//   logits[16 tokens x 8 heads]  = K[16 x D] * q^T[D x 8]
//   o^T[D x 8 heads]            += V^T[D x 16 tokens] * weights[16 x 8]
// q and the weights are fp32: each goes in as the sum of two 16-bit numbers (22 bits in f16, 16 in bf16), which
// doubles the products. At 32 of them for 8 KiB of K and V they take about a tenth of the time of the copies.
#pragma once

#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/rings/share.cuh"

namespace keyhole::gpu {

/// T: __half or __nv_bfloat16. Columns: 1 for groups up to 8, 2 up to 16. Own: warps that go through tiles, fewer than
/// a thread block has where shared memory is too little for all of them.
template <class T, int D, int Columns, uint32_t Own = kWarps>
struct HalfShare {
  static constexpr int kHeads = 8 * Columns;
  static constexpr int kRow =
      D + 8;  ///< elements; 16 bytes more than a row: 8 rows lie in different banks
  static constexpr int kSteps = D / 16;
  static constexpr bool kKeepsQ = kSteps * Columns <= 8;  ///< in registers
  static constexpr uint32_t kTileBytes = kTile * kRow * sizeof(T);
  static constexpr uint32_t kWarpStageBytes = 2 * kTileBytes;

  static constexpr size_t kFixedBytes = (2 * kHeads * kRow + 2 * D) * sizeof(T);
  static constexpr size_t kStageBytes = Own * kWarpStageBytes;
  static constexpr size_t kResultBytes = Own * kHeads * (D + 4) * sizeof(float);
  static_assert(kResultBytes <= kStageBytes, "the result takes the place of the copies");

  /// Copies the warp's tile to `to`, K then V. Tokens that are not stored become zeros (0 * NaN would be NaN).
  __device__ static void copy_tile(const StepParams& p, const Work& w, uint32_t tile, uint32_t to) {
    const uint32_t lane = threadIdx.x % 32;
    const size_t plane = plane_elements<T, D>(p);
    const T* k = reinterpret_cast<const T*>(p.kv) + size_t{w.head} * 2 * plane;
    const uint32_t first = tile * kTile;
    const bool full = first + kTile <= w.stored;
    const uint32_t slot_0 = token_slot(p.ring, w.state, first);
    if (full && token_slot(p.ring, w.state, first + kTile - 1) == slot_0 + kTile - 1) {
      // Slots in a row, as nearly all tiles have them: a third of the instructions, which is half a microsecond at
      // the start of a block, when each warp is alone on its scheduler.
      const T* from = k + size_t{slot_0} * D + lane * 8;
#pragma unroll
      for (uint32_t i = 0; i < D / 16; ++i) {
        const uint32_t piece = lane + 32 * i;
        const uint32_t at =
            to + (piece / (D / 8) * kRow + piece % (D / 8) * 8) * static_cast<uint32_t>(sizeof(T));
        copy_async_line(at, from + i * 256, true);
        copy_async_line(at + kTileBytes, from + plane + i * 256, true);
      }
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 16; ++i) {
      const uint32_t piece = lane + 32 * i;
      const uint32_t row = piece / (D / 8);
      const uint32_t column = (piece % (D / 8)) * 8;
      const uint32_t token = first + row;
      const bool stored = token < w.stored;
      const uint32_t slot = stored ? token_slot(p.ring, w.state, token) : 0;
      const T* from = k + size_t{slot} * D + column;
      const uint32_t at = to + (row * kRow + column) * sizeof(T);
      copy_async_line(at, from, stored);
      copy_async_line(at + kTileBytes, from + plane, stored);
    }
  }

  // Heads of the group that a warp prepares, and quads of components of each head that a lane prepares.
  static constexpr int kOwnHeads = kHeads / static_cast<int>(kWarps);
  static constexpr int kQuads = (D + 127) / 128;
  struct OwnQ {
    RawQuad raw[kOwnHeads][kQuads];
  };

  /// The warp's part of q: asked for before anything else, so that it comes while the copies are begun.
  __device__ static void load_q(const StepParams& p, uint32_t head, OwnQ& q) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kOwnHeads; ++n) {
      const uint32_t g = threadIdx.x / 32 + n * kWarps;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const uint32_t d = (lane + 32 * i) * 4;
        q.raw[n][i] = {};
        if (g < p.group && d < D) {
          q.raw[n][i] =
              load_raw(p.q.data, p.q.dtype, (size_t{head} * p.group + g) * p.q.head_stride + d);
        }
      }
    }
  }

  /// q of the group in two parts, high + low = q / 2^e, and what turns a product with it into a logit.
  __device__ static void split_q(const StepParams& p, const OwnQ& q, T* high, T* low,
                                 float* factors) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kOwnHeads; ++n) {
      const uint32_t g = threadIdx.x / 32 + n * kWarps;
      float x[kQuads][4];
      float largest = 0.0F;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        convert(q.raw[n][i], p.q.dtype, x[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(x[i][j]));
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, offset));
      }
      // A power of two, so that no bit is lost, brings |q| below 2: any q then fits into f16.
      int exponent = static_cast<int>((__float_as_uint(largest) >> 23U) & 255U) - 127;
      if (largest == 0.0F || exponent == 128) exponent = 0;
      exponent = min(max(exponent, -126), 126);
      const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23U);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const uint32_t d = (lane + 32 * i) * 4;
        if (d >= D) continue;
        T hi[4], lo[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = x[i][j] * down;
          hi[j] = rounded_to<T>(y);
          lo[j] = rounded_to<T>(y - as_float(hi[j]));
        }
        *reinterpret_cast<uint2*>(high + g * kRow + d) =
            make_uint2(packed(hi[0], hi[1]), packed(hi[2], hi[3]));
        *reinterpret_cast<uint2*>(low + g * kRow + d) =
            make_uint2(packed(lo[0], lo[1]), packed(lo[2], lo[3]));
      }
      if (lane == 0) {
        factors[g] =
            logit_factor(p.logits) * __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23U);
      }
    }
  }

  /// The pieces of q that this lane multiplies with in step `step` (16 components) of column block c.
  __device__ static uint2 q_piece(const T* part, int c, int step) {
    const uint32_t lane = threadIdx.x % 32;
    const T* at = part + (c * 8 + lane / 4) * kRow + step * 16 + 2 * (lane % 4);
    return make_uint2(*reinterpret_cast<const uint32_t*>(at),
                      *reinterpret_cast<const uint32_t*>(at + 8));
  }

  __device__ static void run(const StepParams& p, std::byte* shared, int stages, const Work& w) {
    __shared__ float factors[kHeads];
    __shared__ AttentionState states[Own * kHeads];
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    T* const high = reinterpret_cast<T*>(shared);
    T* const low = high + kHeads * kRow;
    T* const fresh = low + kHeads * kRow;  // the new token's k, v
    std::byte* const copies = shared + kFixedBytes;
    const uint32_t stage_0 = shared_address(copies) + warp * kWarpStageBytes;

    OwnQ q;
    load_q(p, w.head, q);
    const bool has_tiles = Own == kWarps || warp < Own;
    uint32_t ahead = has_tiles ? w.first + warp : w.end;
    for (int s = 0; s < stages; ++s, ahead += Own) {
      if (ahead < w.end) copy_tile(p, w, ahead, stage_0 + s * kStageBytes);
      commit_copies();
    }
    split_q(p, q, high, low, factors);
    const bool has_new = owns_new_token(w);
    if (has_new) take_new_token<T, D>(p, w, fresh);
    __syncthreads();

    uint2 q_high[kKeepsQ ? Columns : 1][kKeepsQ ? kSteps : 1];
    uint2 q_low[kKeepsQ ? Columns : 1][kKeepsQ ? kSteps : 1];
    if constexpr (kKeepsQ) {
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          q_high[c][step] = q_piece(high, c, step);
          q_low[c][step] = q_piece(low, c, step);
        }
      }
    }
    // This lane's heads are 2 * (lane % 4) and the next one, of each column block.
    float factor[Columns][2];
    AttentionState state[Columns][2];
    float o[kSteps][Columns][4];
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        factor[c][j] = factors[c * 8 + 2 * (lane % 4) + j];
        state[c][j] = AttentionState::empty();
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps * Columns * 4; ++i) (&o[0][0][0])[i] = 0.0F;

    int stage = 0;
    const uint32_t first = has_tiles ? w.first + warp : w.end;
    for (uint32_t tile = first; tile < w.end; tile += Own, ahead += Own) {
      wait_for_copies(stages - 1);
      __syncwarp();
      const uint32_t k_tile = stage_0 + stage * kStageBytes;
      const uint32_t v_tile = k_tile + kTileBytes;
      if (has_new && tile == w.end - 1) {
        const uint32_t row = (w.tokens - 1) % kTile;
        std::byte* to = copies + stage * kStageBytes + warp * kWarpStageBytes;
        for (uint32_t i = lane; i < 2 * (D / 8); i += 32) {
          const uint32_t which = i / (D / 8);
          const uint32_t column = (i % (D / 8)) * 8;
          *reinterpret_cast<uint4*>(to + which * kTileBytes + (row * kRow + column) * sizeof(T)) =
              *reinterpret_cast<const uint4*>(fresh + which * D + column);
        }
        __syncwarp();
      }

      float logits[Columns][4], rest[Columns][4];
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) logits[c][j] = rest[c][j] = 0.0F;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t k[4];
        load_matrices(k, k_tile + ((lane % 16) * kRow + step * 16 + (lane / 16) * 8) * sizeof(T));
#pragma unroll
        for (int c = 0; c < Columns; ++c) {
          uint2 qh, ql;
          if constexpr (kKeepsQ) {
            qh = q_high[c][step];
            ql = q_low[c][step];
          } else {
            qh = q_piece(high, c, step);
            ql = q_piece(low, c, step);
          }
          multiply_add<T>(logits[c], k, qh.x, qh.y);
          multiply_add<T>(rest[c], k, ql.x, ql.y);
        }
      }

      // Element j of a product: token lane / 4 (+ 8 for j >= 2), head 2 * (lane % 4) + j % 2.
      bool there[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t token = tile * kTile + lane / 4 + half * 8;
        there[half] = token < w.tokens && sees(p, w, token);
      }
      uint32_t weights_high[Columns][2], weights_low[Columns][2];
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] = there[j / 2]
                     ? logit_base2(logits[c][j] + rest[c][j], factor[c][j % 2], p.logits.softcap)
                     : kMinusInf;
        }
        float scale[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float largest = fmaxf(x[j], x[j + 2]);
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, offset));
          }
          AttentionState& own = state[c][j];
          scale[j] = own.raise(fmaxf(largest, own.m));
          x[j] = own.weight(x[j]);
          x[j + 2] = own.weight(x[j + 2]);
          own.d = own.d * scale[j] + x[j] + x[j + 2];
        }
        T hi[4], lo[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          hi[j] = rounded_to<T>(x[j]);
          lo[j] = rounded_to<T>(x[j] - as_float(hi[j]));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weights_high[c][j] = transposed(packed(hi[2 * j], hi[2 * j + 1]));
          weights_low[c][j] = transposed(packed(lo[2 * j], lo[2 * j + 1]));
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int j = 0; j < 4; ++j) o[step][c][j] *= scale[j % 2];
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t v[4];
        load_matrices_transposed(
            v, v_tile + ((lane % 8 + (lane / 16) * 8) * kRow + step * 16 + ((lane / 8) % 2) * 8) *
                            sizeof(T));
#pragma unroll
        for (int c = 0; c < Columns; ++c) {
          multiply_add<T>(o[step][c], v, weights_high[c][0], weights_high[c][1]);
          multiply_add<T>(o[step][c], v, weights_low[c][0], weights_low[c][1]);
        }
      }

      __syncwarp();  // all lanes have read the tile before its place is filled again
      if (ahead < w.end) copy_tile(p, w, ahead, k_tile);
      commit_copies();
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    wait_for_copies(0);
    __syncthreads();  // the result takes the place of the copies, of all warps

    float* const result = reinterpret_cast<float*>(copies);
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        for (int offset = 4; offset < 32; offset *= 2) {
          state[c][j].d += __shfl_xor_sync(kWholeWarp, state[c][j].d, offset);
        }
        const uint32_t head = c * 8 + 2 * (lane % 4) + j;
        if (!has_tiles) continue;
        if (lane < 4) states[warp * kHeads + head] = state[c][j];
        float* row = result + (warp * kHeads + head) * (D + 4) + lane / 4;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          row[step * 16] = o[step][c][j];
          row[step * 16 + 8] = o[step][c][j + 2];
        }
      }
    }
    __syncthreads();
    write_partial<D, Own, kHeads>(p, w, result, states);
  }
};

}  // namespace keyhole::gpu
