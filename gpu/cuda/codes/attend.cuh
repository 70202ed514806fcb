// The pass over all codes of a layer. A warp takes a block of 256 rows at a time, in tiles of 16:
//
//   scores   <q, u> in integers: keys' codes where they lie in their bytes (a mask, no shift) times q in two 8-bit parts
//            (15 bits, less where codes lie high), which are two columns of one product m16n8k32: 4 heads fill its 8
//   logits   scale * log2(e) * (f <q, level> + <q, mean>) - noise, in fp32: a lane has 2 rows of one head
//   weights  2^(logit - m), m a running maximum that moves only where a logit passes it by 2^6, so that a tile costs no
//            reduction; weight times value factor in fp16 and what that lost, again two columns
//   values   the codes in the mantissas of fp16 numbers 1 + u/4 or 1 + u/16 (one shift and mask for two codes, one mask
//            alone where they lie right), m16n8k16; the ones' part comes off at the end
//
// FLOOR. 70.5 bytes a row at 2/2 and d = 128: 74 MB for 128k tokens of 8 KV heads, 18 us at 4 TB/s.
#pragma once

#include <cuda_fp16.h>

#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu {
namespace codes {

constexpr int kWarps = 8;
constexpr float kHeadroom = 6.0F;  // log2: by how much a logit may pass the running maximum

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Step `step` of a tile's keys, rows lane/4 + 8 r: u times key_weight(step).
template <int kBits, int kWords>
__device__ inline uint32_t key_register(const uint32_t (&words)[kWords], int step, int r) {
  constexpr int kPer = 8 / kBits;
  constexpr uint32_t kMask = kBits == 1 ? 0x01010101U : kBits == 2 ? 0x03030303U : 0x0F0F0F0FU;
  if (step / kPer * 2 + r >= kWords) return 0;  // components beyond a head dimension of 80
  return words[step / kPer * 2 + r] & (kMask << (step % kPer * kBits));
}
template <int kBits>
__device__ inline float key_weight(int step) {
  constexpr int kPer = 8 / kBits;
  return static_cast<float>(1 << (step % kPer * kBits));
}

/// Values' codes as fp16 numbers 1 + u / unit. Registers with an odd number, which are components 8 and more of a
/// product's 16, have another unit where that saves a shift.
template <int kBits>
struct ValueUnits;
template <>
struct ValueUnits<1> {
  static constexpr float kEven = 4.0F, kOdd = 2.0F;
  static constexpr uint32_t kEvenMask = 0x01000100U, kOddMask = 0x02000200U;
  __host__ __device__ static constexpr int left(int sub) { return 8 - sub / 2 * 2; }
};
template <>
struct ValueUnits<2> {
  static constexpr float kEven = 4.0F, kOdd = 16.0F;
  static constexpr uint32_t kEvenMask = 0x03000300U, kOddMask = 0x00C000C0U;
  __host__ __device__ static constexpr int left(int sub) {
    return sub % 2 == 0 ? 8 - 2 * sub : 6 - 2 * sub;
  }
};
template <>
struct ValueUnits<4> {
  static constexpr float kEven = 16.0F, kOdd = 16.0F;
  static constexpr uint32_t kEvenMask = 0x03C003C0U, kOddMask = 0x03C003C0U;
  __host__ __device__ static constexpr int left(int sub) { return 6 - 4 * sub; }
};

template <int kBits, int kWords>
__device__ inline uint32_t value_register(const uint32_t (&words)[kWords], int reg, uint32_t ones) {
  using Units = ValueUnits<kBits>;
  constexpr int kPer = 16 / kBits;
  const int left = Units::left(reg % kPer);
  const uint32_t word = words[reg / kPer];
  const uint32_t moved = left >= 0 ? word << left : word >> -left;
  // One instruction, (moved & mask) | ones, as long as `ones` is in a register.
  return (moved & (reg % 2 == 0 ? Units::kEvenMask : Units::kOddMask)) | ones;
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

__device__ inline float max_of_head(float x) {  // over the 8 lanes with the same lane % 4
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, step));
  return x;
}
__device__ inline float sum_of_head(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0U, x, step);
  return x;
}
/// One warp rotates a row in shared memory.
__device__ inline void rotate_in_shared(float* row, uint32_t dim, bool back) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t passes = hadamard_passes(dim);
  for (uint32_t i = 0; i < passes; ++i) {
    const uint32_t number = back ? passes - 1 - i : i;
    const HadamardPass pass = hadamard_pass(dim, number);
    float* x = row + pass.begin;
    if (!back) {
      for (uint32_t j = lane; j < pass.size; j += 32) x[j] *= code_sign(number, j);
      __syncwarp();
    }
    for (uint32_t step = 1; step < pass.size; step *= 2) {
      for (uint32_t p = lane; p < pass.size / 2; p += 32) {
        const uint32_t at = p / step * 2 * step + p % step;
        const float a = x[at], b = x[at + step];
        x[at] = a + b;
        x[at + step] = a - b;
      }
      __syncwarp();
    }
    const float norm = 1.0F / sqrtf(static_cast<float>(pass.size));
    for (uint32_t j = lane; j < pass.size; j += 32) {
      x[j] *= back ? norm * code_sign(number, j) : norm;
    }
    __syncwarp();
  }
}

/// One warp rotates a row of kDim, a power of 2, of which a lane has the elements lane, lane + 32, ...
template <int kDim>
__device__ inline void rotate_in_registers(float (&x)[kDim / 32], int lane) {
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) x[i] *= code_sign(0, static_cast<uint32_t>(lane + 32 * i));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const float other = __shfl_xor_sync(~0U, x[i], step);
      x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kDim / 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if ((i & step) != 0) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  const float norm = 1.0F / sqrtf(static_cast<float>(kDim));
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) x[i] *= norm;
}

/// What all tiles need of a head's query.
struct HeadConstants {
  float slope;   ///< of the logit by <q, u>: 2 scale log2(e) * step of q
  float offset;  ///< of the logit at u = 0
  float noise;   ///< 0.5 scale^2 |q'|^2 log2(e)
};

template <int kDim, int kKeyBits, int kHeadTiles>
struct SharedQueries {
  static constexpr int kSteps = (kDim + 31) / 32;  // products
  static constexpr int kHeads = 4 * kHeadTiles;
  alignas(16) int8_t parts[2 * kHeads][kSteps * 32];
  float rows[kHeads][kDim];  ///< times scale log2(e)
  HeadConstants constants[kHeads];

  template <int kBlockWarps>
  __device__ void prepare(const CodesStep& s, uint32_t kv_head) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int h = warp; h < kHeads; h += kBlockWarps) {
      float* row = rows[h];
      const bool present = h < static_cast<int>(s.group);
      const float* q = s.q + (size_t{kv_head} * s.group + h) * kDim;
      if constexpr ((kDim & (kDim - 1)) == 0) {
        float x[kDim / 32];
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) {
          const int j = lane + 32 * i;
          x[i] = present ? q[j] / s.key_scale[size_t{kv_head} * kDim + j] : 0.0F;
        }
        rotate_in_registers<kDim>(x, lane);
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) row[lane + 32 * i] = x[i];
        __syncwarp();
      } else {
        for (int j = lane; j < kDim; j += 32) {
          row[j] = present ? q[j] / s.key_scale[size_t{kv_head} * kDim + j] : 0.0F;
        }
        __syncwarp();
        rotate_in_shared(row, kDim, false);
      }
      float square = 0.0F, largest = 0.0F;
      for (int j = lane; j < kDim; j += 32) {
        square += row[j] * row[j];
        largest = fmaxf(largest, fabsf(row[j]));
      }
      square = warp_sum(square);
      largest = warp_max(largest);
      // 127 * 128: the high part of 8 bits and 7 bits below it.
      const float step = largest > 0.0F ? largest / 16256.0F : 1.0F;
      float sum = 0.0F;
      for (int j = lane; j < kSteps * 32; j += 32) {
        const float weight = key_weight<kKeyBits>(j / 16);
        const int x = j < kDim ? __float2int_rn(row[j] / (step * weight)) : 0;
        const int high = (x + 64) >> 7;
        parts[2 * h][j] = static_cast<int8_t>(high);
        parts[2 * h + 1][j] = static_cast<int8_t>(x - high * 128);
        sum += static_cast<float>(x) * weight;
      }
      sum = warp_sum(sum);
      const float unit = s.logit_scale * kLog2E;
      for (int j = lane; j < kDim; j += 32) row[j] *= unit;
      if (lane == 0) {
        constants[h] = {
            2.0F * unit * step,
            -unit * step * static_cast<float>((1 << kKeyBits) - 1) * static_cast<float>(sum),
            0.5F * s.logit_scale * s.logit_scale * square * kLog2E};
      }
    }
  }
};

/// The b registers of the products for a lane, and the constants of its heads 4 t + lane % 4.
template <int kDim, int kKeyBits, int kHeadTiles>
__device__ inline void load_products(const SharedQueries<kDim, kKeyBits, kHeadTiles>& queries,
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

/// <row of head lane % 4, mean>, for all lanes; rows already have the logits' scale.
template <int kDim>
__device__ inline float mean_logit(const float (*rows)[kDim], const __half* mean, int lane) {
  float sums[4] = {};
#pragma unroll
  for (int j = 2 * lane; j < kDim; j += 64) {
    const float2 m = __half22float2(*reinterpret_cast<const __half2*>(mean + j));
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float2 q = *reinterpret_cast<const float2*>(&rows[h][j]);
      sums[h] = fmaf(q.x, m.x, fmaf(q.y, m.y, sums[h]));
    }
  }
  // Each exchange halves the heads that a lane sums for, until it has its own.
  const bool odd = (lane & 1) != 0;
  const float a = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(~0U, odd ? sums[0] : sums[1], 1);
  const float b = (odd ? sums[3] : sums[2]) + __shfl_xor_sync(~0U, odd ? sums[2] : sums[3], 1);
  const bool high = (lane & 2) != 0;
  return sum_of_head((high ? b : a) + __shfl_xor_sync(~0U, high ? a : b, 2));
}

/// Logits in base 2 of rows lane/4 (x) and lane/4 + 8 (y) of a tile, for head 4 t + lane % 4. q: the products' b
/// registers; middle: the logits of the block's mean key.
template <int kDim, int kKeyBits, int kHeadTiles, int kWords>
__device__ inline void tile_logits(const uint32_t (&keys)[kWords], float f0, float f1,
                                   const uint32_t (&q)[kHeadTiles][(kDim + 31) / 32][2],
                                   const HeadConstants (&head)[kHeadTiles], float noise,
                                   const float (&middle)[kHeadTiles],
                                   float2 (&logits)[kHeadTiles]) {
  int scores[kHeadTiles][4] = {};
#pragma unroll
  for (int step = 0; step < (kDim + 31) / 32; ++step) {
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = key_register<kKeyBits>(keys, 2 * step + r / 2, r % 2);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      multiply_add_bytes(scores[t], a, q[t][step][0], q[t][step][1]);
    }
  }
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const float n = head[t].noise * noise;
    const float x0 =
        fmaf(static_cast<float>(scores[t][0] * 128 + scores[t][1]), head[t].slope, head[t].offset);
    const float x1 =
        fmaf(static_cast<float>(scores[t][2] * 128 + scores[t][3]), head[t].slope, head[t].offset);
    logits[t].x = fmaf(f0, fmaf(-n, f0, x0), middle[t]);
    logits[t].y = fmaf(f1, fmaf(-n, f1, x1), middle[t]);
  }
}

/// What a lane holds of a tile of 16 rows.
template <int kDim, int kKeyBits, int kValueBits>
struct CodeTile {
  static constexpr CodeShape kShape{kDim, kKeyBits, kValueBits};
  static constexpr int kKeyWords = static_cast<int>(kShape.key_words());
  static constexpr int kValueWords = kValueBits == 0 ? 1 : static_cast<int>(kShape.value_words());
  uint32_t keys[kKeyWords];
  uint32_t values[kValueWords];
  __half2 factors[2];  ///< (f, g) of rows lane/4 and lane/4 + 8

  /// Of a block of this shape, or, without values here, of any with the same keys.
  __device__ void load_of(const CodeShape& shape, const std::byte* block, int tile, int lane) {
    load_words<kKeyWords>(block + size_t{kCodeLanes} * kKeyWords * 4 * tile, lane, keys);
    if constexpr (kValueBits != 0) {
      load_words<kValueWords>(
          block + shape.values_at() + size_t{kCodeLanes} * kValueWords * 4 * tile, lane, values);
    }
    const auto* from =
        reinterpret_cast<const __half2*>(block + shape.factors_at()) + kCodeTile * tile;
    factors[0] = from[lane / 4];
    factors[1] = from[lane / 4 + 8];
  }
  __device__ void load(const std::byte* block, int tile, int lane) {
    constexpr CodeShape kWhole{kDim, kKeyBits, kValueBits};
    load_of(kWhole, block, tile, lane);
  }
};

template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles>
__global__ void __launch_bounds__(kWarps * 32, kHeadTiles == 1 && kDim <= 128 ? 2 : 1)
    attend_kernel(const CodesStep s) {
  constexpr CodeShape kShape{kDim, kKeyBits, kValueBits};
  constexpr int kSteps = static_cast<int>(kShape.key_steps()) / 2;
  constexpr int kProducts = kDim / 16;  // of values, 16 components each
  constexpr size_t kBlockBytes = kShape.block_bytes();
  using Units = ValueUnits<kValueBits == 0 ? 2 : kValueBits>;

  __shared__ SharedQueries<kDim, kKeyBits, kHeadTiles> queries;
  // A row more than there is: the four heads of a warp then lie in different banks.
  __shared__ float shared_o[kWarps][4][kDim + 8];
  __shared__ float shared_max[kWarps][4 * kHeadTiles], shared_sum[kWarps][4 * kHeadTiles];

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t kv_head = blockIdx.y;
  const std::byte* const base = s.blocks + kv_head * s.head_stride;
  const uint32_t stride = gridDim.x * kWarps;
  const uint32_t first = blockIdx.x * kWarps + warp;
  // The first tiles are on their way while the queries are prepared.
  CodeTile<kDim, kKeyBits, kValueBits> next[2];
  if (first < s.block_count) {
    next[0].load(base + first * kBlockBytes, 0, lane);
    next[1].load(base + first * kBlockBytes, 1, lane);
  }
  queries.template prepare<kWarps>(s, kv_head);
  __syncthreads();

  uint32_t q[kHeadTiles][kSteps][2];
  HeadConstants head[kHeadTiles];
  load_products<kDim, kKeyBits, kHeadTiles>(queries, lane, q, head);

  // Two fp16 ones. The compiler must not know them: masking and joining a constant would take two instructions, not
  // one. A group is never as large as that.
  const uint32_t ones = 0x3C003C00U + (s.group >> 16U);

  float acc[kHeadTiles][kProducts][4] = {};
  float top[kHeadTiles], sum[kHeadTiles], scaled_sum[kHeadTiles];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    top[t] = kMinusInf;
    sum[t] = scaled_sum[t] = 0.0F;
  }

  for (uint32_t b = first; b < s.block_count; b += stride) {
    const std::byte* block = base + b * kBlockBytes;
    const std::byte* after = b + stride < s.block_count ? block + stride * kBlockBytes : block;
    const auto* key_mean = reinterpret_cast<const __half*>(block + kShape.key_mean_at());
    const float noise = *reinterpret_cast<const float*>(block + kShape.noise_at());
    float middle[kHeadTiles], block_sum[kHeadTiles];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      middle[t] = mean_logit<kDim>(&queries.rows[4 * t], key_mean, lane);
      block_sum[t] = 0.0F;
    }
    for (int pair = 0; pair < static_cast<int>(kCodeTiles) / 2; ++pair) {
      const CodeTile<kDim, kKeyBits, kValueBits> now[2] = {next[0], next[1]};
      const bool last = pair + 1 == static_cast<int>(kCodeTiles) / 2;
      next[0].load(last ? after : block, last ? 0 : 2 * pair + 2, lane);
      next[1].load(last ? after : block, last ? 1 : 2 * pair + 3, lane);
      float largest[kHeadTiles];
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) largest[t] = kMinusInf;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& tile = now[half];
        const float f0 = __low2float(tile.factors[0]), g0 = __high2float(tile.factors[0]);
        const float f1 = __low2float(tile.factors[1]), g1 = __high2float(tile.factors[1]);
        uint32_t weights[kHeadTiles][2];
        float2 logits[kHeadTiles];
        tile_logits<kDim, kKeyBits, kHeadTiles>(tile.keys, f0, f1, q, head, noise, middle, logits);
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          const float l0 = logits[t].x, l1 = logits[t].y;
          const float larger = fmaxf(l0, l1);
          largest[t] = fmaxf(largest[t], larger);
          if (__any_sync(~0U, larger > top[t] + kHeadroom)) {
            const float moved = fmaxf(top[t], max_of_head(larger));
            const float keep = exp2_fast(top[t] - moved);
            top[t] = moved;
            sum[t] *= keep;
            block_sum[t] *= keep;
            scaled_sum[t] *= keep;
#pragma unroll
            for (int m = 0; m < kProducts; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) acc[t][m][i] *= keep;
            }
          }
          const float p0 = exp2_fast(l0 - top[t]);
          const float p1 = exp2_fast(l1 - top[t]);
          block_sum[t] += p0 + p1;
          if constexpr (kValueBits != 0) {
            const float w0 = p0 * g0, w1 = p1 * g1;
            scaled_sum[t] += w0 + w1;
            const __half h0 = __float2half_rn(w0), h1 = __float2half_rn(w1);
            const __half r0 = __float2half_rn(w0 - __half2float(h0));
            const __half r1 = __float2half_rn(w1 - __half2float(h1));
            weights[t][0] = transposed(packed(h0, r0));
            weights[t][1] = transposed(packed(h1, r1));
          }
        }
        if constexpr (kValueBits != 0) {
#pragma unroll
          for (int m = 0; m < kProducts; ++m) {
            uint32_t a[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
              a[r] = value_register<kValueBits>(tile.values, 4 * m + r, ones);
#pragma unroll
            for (int t = 0; t < kHeadTiles; ++t) {
              multiply_add<__half>(acc[t][m], a, weights[t][0], weights[t][1]);
            }
          }
        }
      }
      if (s.maxima != nullptr) {
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          const float best = max_of_head(largest[t]);
          if (lane < 4) {
            const size_t at = (size_t{kv_head} * s.block_count + b) * (kCodeTiles / 2) + pair;
            s.maxima[at * (4 * kHeadTiles) + 4 * t + lane] = best;
          }
        }
      }
    }
    // The mean value of the block, for all that its rows weigh.
    const auto* value_mean = reinterpret_cast<const __half*>(block + kShape.value_mean_at());
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      sum[t] += block_sum[t];
      const float all = sum_of_head(block_sum[t]);
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
        const int j = 16 * m + lane / 4;
        acc[t][m][0] = fmaf(all * (0.5F / Units::kEven), __half2float(value_mean[j]), acc[t][m][0]);
        acc[t][m][2] =
            fmaf(all * (0.5F / Units::kOdd), __half2float(value_mean[j + 8]), acc[t][m][2]);
      }
    }
  }

  // The warps' states, summed in a fixed order, four heads at a time.
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    sum[t] = sum_of_head(sum[t]);
    scaled_sum[t] = sum_of_head(scaled_sum[t]);
    if (lane < 4) {
      shared_max[warp][4 * t + lane] = top[t];
      shared_sum[warp][4 * t + lane] = sum[t];
    }
  }
  const size_t part = (size_t{kv_head} * s.splits + blockIdx.x) * s.group;
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const float levels = static_cast<float>((1 << kValueBits) - 1);
    const float even = kValueBits == 0 ? 0.0F : (2.0F * Units::kEven + levels) * scaled_sum[t];
    const float odd = kValueBits == 0 ? 0.0F : (2.0F * Units::kOdd + levels) * scaled_sum[t];
    float* row = shared_o[warp][lane % 4];
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      const int j = 16 * m + lane / 4;
      row[j] = 2.0F * Units::kEven * (acc[t][m][0] + acc[t][m][1]) - even;
      row[j + 8] = 2.0F * Units::kOdd * (acc[t][m][2] + acc[t][m][3]) - odd;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 4 * kDim; i += kWarps * 32) {
      const int h = 4 * t + i / kDim;
      if (h >= static_cast<int>(s.group)) break;
      float overall = kMinusInf;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) overall = fmaxf(overall, shared_max[w][h]);
      float o = 0.0F, total = 0.0F;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        // A warp without a block has a maximum of -inf and a state of zeros.
        const float keep = overall == kMinusInf ? 0.0F : exp2_fast(shared_max[w][h] - overall);
        o = fmaf(keep, shared_o[w][i / kDim][i % kDim], o);
        total = fmaf(keep, shared_sum[w][h], total);
      }
      s.part_o[(part + h) * kDim + i % kDim] = o;
      if (i % kDim == 0) s.part_sum[part + h] = make_float2(overall, total);
    }
    __syncthreads();
  }
}

}  // namespace codes
}  // namespace keyhole::gpu
