// The tail of a layer: what the partitions that were not chosen add to each head, from the weights that the choice has
// left behind. Grid (splits, KV heads, parts of 4 heads of a group). Reads values `[kv_heads, capacity, dim]`; writes
// tail_o `[q_heads, dim]` and tail_lse `[q_heads]` (natural log). Shares are relative to the head's sum of weights,
// which is known by now: no running maximum, and parts are plain sums. A warp reads a row of values at a time; the
// block that finishes last for a group of heads adds the parts up in their order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/partitions/group.cuh"
#include "gpu/cuda/partitions/kernels.h"

namespace keyhole::gpu {

namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kChunk =
    256;  // partitions whose values are read at once: half a batch per warp where half are read
constexpr float kNothing = 1e-30F;  // a share of the head's weights that counts as none

/// Partitions of one part: a multiple of kChunk, so that there are at most kMostSplits.
uint32_t partitions_per_split(uint32_t capacity) {
  const uint32_t least = (capacity + kMostSplits - 1) / kMostSplits;
  return (least + kChunk - 1) / kChunk * kChunk;
}

/// Four elements of a row.
template <class T>
struct Loaded;

template <>
struct Loaded<float> {
  float4 x;
  __device__ void load(const float* at) { x = __ldcs(reinterpret_cast<const float4*>(at)); }
  __device__ void to(float (&out)[4]) const {
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
  }
};

template <class Pair>
struct LoadedPairs {
  uint2 x;
  __device__ void load(const void* at) { x = __ldcs(static_cast<const uint2*>(at)); }
};

template <>
struct Loaded<__half> : LoadedPairs<__half2> {
  __device__ void to(float (&out)[4]) const {
    const float2 a = __half22float2(reinterpret_cast<const __half2&>(x.x));
    const float2 b = __half22float2(reinterpret_cast<const __half2&>(x.y));
    out[0] = a.x;
    out[1] = a.y;
    out[2] = b.x;
    out[3] = b.y;
  }
};

template <>
struct Loaded<__nv_bfloat16> : LoadedPairs<__nv_bfloat162> {
  __device__ void to(float (&out)[4]) const {
    out[0] = __uint_as_float(x.x << 16);
    out[1] = __uint_as_float(x.x & 0xffff0000U);
    out[2] = __uint_as_float(x.y << 16);
    out[3] = __uint_as_float(x.y & 0xffff0000U);
  }
};

/// Slots: 4 elements each that a lane has of a row. H: heads that share the reading of a value.
template <uint32_t Slots, uint32_t H>
struct Shared {
  float shares[kChunk][H];  // of the partitions that are read
  uint32_t ids[kChunk];
  uint32_t counts[kChunk / 32];
  float sums[kChunk / 32][H][2];
  float o[kWarps / 2][H][Slots * 128];
  bool is_last;
};

/// A load that stays where it is written: the compiler moves others behind the branches that need not have them.
__device__ float load_here(const float* at) {
  float x = 0.0F;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at));
  return x;
}

/// What the choice has left of one partition, for H heads.
template <uint32_t H>
struct Weights {
  float weights[H], factors[H];
  uint32_t chosen_bits = 0;

  /// i: of all partitions of the layer, on the device whether the head has so many or not.
  __device__ void load(const PartitionsLayer& l, size_t i, uint32_t first_head, uint32_t heads) {
    const float* at = l.weights + i * l.padded + first_head;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(chosen_bits) : "l"(l.chosen_bits + i / 32));
    if (H == 4 && heads == 4) {
      asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(weights[0]), "=f"(weights[1 % H]), "=f"(weights[2 % H]),
                     "=f"(weights[3 % H])
                   : "l"(at));
    } else {
#pragma unroll
      for (uint32_t h = 0; h < H; ++h) weights[h] = h < heads ? load_here(at + h) : 0.0F;
    }
#pragma unroll
    for (uint32_t h = 0; h < H; ++h) {
      factors[h] = h < heads ? 1.0F : 0.0F;
      if (!l.has_shares && h < heads) {
        factors[h] = load_here(l.factors + i / kPartitionTile * l.padded + first_head + h);
      }
    }
  }
};

template <class T, uint32_t Slots, uint32_t H>
__global__ void __launch_bounds__(kThreads, Slots == 1 ? 2 : 1)
    attend_kernel(const __grid_constant__ PartitionsLayer l, uint32_t per_split) {
  __shared__ alignas(16) Shared<Slots, H> s;
  constexpr uint32_t kAtOnce = Slots * sizeof(T) > 2 ? 4 : 8;  // rows in flight per warp
  const uint32_t kv_head = blockIdx.y;
  const uint32_t first_head = blockIdx.z * H;  // of the group
  const uint32_t heads = min(l.group - first_head, H);
  const uint32_t q_head = kv_head * l.group + first_head;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t begin = blockIdx.x * per_split;
  const size_t base = size_t{kv_head} * l.capacity;
  // All that the block needs to know, in one round trip: `begin` is below the capacity.
  Weights<H> loaded;
  const bool has_partition = threadIdx.x < kChunk;
  if (has_partition && begin + threadIdx.x < l.capacity) {
    loaded.load(l, base + begin + threadIdx.x, first_head, heads);
  }
  float least[H];
#pragma unroll
  for (uint32_t h = 0; h < H; ++h) {
    least[h] = h < heads ? load_here(l.least_shares + q_head + h) : 0.0F;
  }
  const PartitionsHead head = l.heads[kv_head];
  const bool is_none = head.tail == static_cast<uint32_t>(PartitionsTail::none) || head.count == 0;
  if (is_none) {
    if (blockIdx.x != 0) return;
    for (uint32_t i = threadIdx.x; i < heads * l.dim; i += kThreads) {
      l.tail_o[size_t{q_head} * l.dim + i] = 0.0F;
    }
    if (threadIdx.x < heads) l.tail_lse[q_head + threadIdx.x] = kMinusInf;
    return;
  }
  const uint32_t splits = (head.count + per_split - 1) / per_split;
  if (blockIdx.x >= splits) return;
  const uint32_t end = min(begin + per_split, head.count);
  const T* values = reinterpret_cast<const T*>(l.values) + base * l.dim;

  float all[H] = {};
  float read[H] = {};
  float o[Slots][H][4] = {};
  for (uint32_t at = begin; at < end; at += kChunk) {
    const uint32_t p = at + threadIdx.x;
    float shares[H] = {};
    bool is_read = false;
    if (has_partition && p < end) {
      if (at != begin) loaded.load(l, base + p, first_head, heads);
      const bool is_chosen = (loaded.chosen_bits >> (p % 32) & 1) != 0;
#pragma unroll
      for (uint32_t h = 0; h < H; ++h) {
        shares[h] = is_chosen ? 0.0F : loaded.weights[h] * loaded.factors[h];
        all[h] += shares[h];
        is_read = is_read || shares[h] > least[h];
      }
    }
    const uint32_t ballot = __ballot_sync(kWholeWarp, is_read);
    __syncthreads();  // s.ids and s.shares of the round before have been read
    if (lane == 0 && warp < kChunk / 32) s.counts[warp] = __popc(ballot);
    __syncthreads();
    // Ballots of 8 warps, not cub::BlockScan: flags need no scan within a warp.
    uint32_t slot = __popc(ballot & ((1U << lane) - 1));
    uint32_t count = 0;
    for (uint32_t w = 0; w < kChunk / 32; ++w) {
      slot += w < warp ? s.counts[w] : 0;
      count += s.counts[w];
    }
    if (is_read) {
      s.ids[slot] = p;
#pragma unroll
      for (uint32_t h = 0; h < H; ++h) {
        s.shares[slot][h] = shares[h];
        read[h] += shares[h];
      }
    }
    __syncthreads();
    for (uint32_t i = warp; i < count; i += kWarps * kAtOnce) {
      Loaded<T> rows[kAtOnce][Slots];
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        // Past the end the last row again, which weighs nothing.
        const T* row = values + size_t{s.ids[min(i + k * kWarps, count - 1)]} * l.dim;
#pragma unroll
        for (uint32_t slot_of_row = 0; slot_of_row < Slots; ++slot_of_row) {
          const uint32_t element = slot_of_row * 128 + lane * 4;
          if (element < l.dim) rows[k][slot_of_row].load(row + element);
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        if (i + k * kWarps >= count) break;
        float by[H];
        load_group<H>(s.shares[i + k * kWarps], by);
#pragma unroll
        for (uint32_t slot_of_row = 0; slot_of_row < Slots; ++slot_of_row) {
          if (slot_of_row * 128 + lane * 4 >= l.dim) continue;
          float x[4];
          rows[k][slot_of_row].to(x);
#pragma unroll
          for (uint32_t h = 0; h < H; ++h) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) o[slot_of_row][h][e] += by[h] * x[e];
          }
        }
      }
    }
  }

  // The block's part. Half of the warps after the other: s.o holds the sums of half of them.
#pragma unroll
  for (uint32_t h = 0; h < H; ++h) {
    for (uint32_t offset = 16; offset > 0; offset /= 2) {
      all[h] += __shfl_xor_sync(kWholeWarp, all[h], offset);
      read[h] += __shfl_xor_sync(kWholeWarp, read[h], offset);
    }
    if (lane == 0 && warp < kChunk / 32) {
      s.sums[warp][h][0] = all[h];
      s.sums[warp][h][1] = read[h];
    }
  }
  for (uint32_t half = 2; half-- > 0;) {
    if (warp / (kWarps / 2) == half) {
#pragma unroll
      for (uint32_t h = 0; h < H; ++h) {
#pragma unroll
        for (uint32_t slot = 0; slot < Slots; ++slot) {
          auto* at = reinterpret_cast<float4*>(s.o[warp % (kWarps / 2)][h] + slot * 128 + lane * 4);
          float4 x = make_float4(o[slot][h][0], o[slot][h][1], o[slot][h][2], o[slot][h][3]);
          if (half == 0) {
            const float4 other = *at;
            x = make_float4(x.x + other.x, x.y + other.y, x.z + other.z, x.w + other.w);
          }
          *at = x;
        }
      }
    }
    __syncthreads();
  }
  for (uint32_t i = threadIdx.x; i < heads * l.dim; i += kThreads) {
    const uint32_t h = i / l.dim;
    const uint32_t e = i - h * l.dim;
    float sum = 0.0F;
#pragma unroll
    for (uint32_t w = 0; w < kWarps / 2; ++w) sum += s.o[w][h][e];
    l.partial_o[(size_t{q_head + h} * kMostSplits + blockIdx.x) * l.dim + e] = sum;
  }
  if (threadIdx.x < 2 * heads) {
    const uint32_t h = threadIdx.x / 2;
    float sum = 0.0F;
    for (uint32_t w = 0; w < kChunk / 32; ++w) sum += s.sums[w][h][threadIdx.x % 2];
    l.partial_sums[(size_t{q_head + h} * kMostSplits + blockIdx.x) * 2 + threadIdx.x % 2] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s.is_last = arrive(l.tail_arrivals + q_head) == splits - 1;
    if (s.is_last) l.tail_arrivals[q_head] = 0;
  }
  __syncthreads();
  if (!s.is_last) return;

  // All parts.
  if (warp < heads) {
    const float* sums = l.partial_sums + size_t{q_head + warp} * kMostSplits * 2;
    float whole = 0.0F;
    float of_read = 0.0F;
    for (uint32_t i = lane; i < splits; i += 32) {
      whole += __ldcg(sums + 2 * i);
      of_read += __ldcg(sums + 2 * i + 1);
    }
    for (uint32_t offset = 16; offset > 0; offset /= 2) {
      whole += __shfl_xor_sync(kWholeWarp, whole, offset);
      of_read += __shfl_xor_sync(kWholeWarp, of_read, offset);
    }
    if (lane == 0) {
      s.sums[warp][0][0] = whole > kNothing && of_read > kNothing ? 1.0F / of_read : 0.0F;
      l.tail_lse[q_head + warp] =
          whole > kNothing ? (l.log_sums[q_head + warp] + log2f(whole)) * kLn2 : kMinusInf;
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < heads * l.dim; i += kThreads) {
    const uint32_t h = i / l.dim;
    const uint32_t e = i - h * l.dim;
    const float* parts = l.partial_o + size_t{q_head + h} * kMostSplits * l.dim + e;
    float sum = 0.0F;
#pragma unroll 32
    for (uint32_t k = 0; k < splits; ++k) sum += __ldcg(parts + size_t{k} * l.dim);
    l.tail_o[size_t{q_head + h} * l.dim + e] = sum * s.sums[h][0][0];
  }
}

using Kernel = void (*)(PartitionsLayer, uint32_t);

template <class T>
Kernel kernel_of(const PartitionsLayer& l) {
  if (l.dim > 128) return l.group == 1 ? attend_kernel<T, 2, 1> : attend_kernel<T, 2, 4>;
  return l.group == 1 ? attend_kernel<T, 1, 1> : attend_kernel<T, 1, 4>;
}

Kernel kernel_for(const PartitionsLayer& l) {
  switch (l.dtype) {
    case DType::f16: return kernel_of<__half>(l);
    case DType::bf16: return kernel_of<__nv_bfloat16>(l);
    default: return kernel_of<float>(l);
  }
}

}  // namespace

cudaError_t load_attend(const PartitionsLayer& layer) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel_for(layer));
}

void launch_attend(const PartitionsLayer& layer, cudaStream_t stream) {
  const uint32_t per_split = partitions_per_split(layer.capacity);
  const uint32_t splits = (layer.capacity + per_split - 1) / per_split;
  const dim3 grid(splits, layer.kv_heads, layer.group == 1 ? 1 : (layer.group + 3) / 4);
  kernel_for(layer)<<<grid, kThreads, 0, stream>>>(layer, per_split);
}

}  // namespace keyhole::gpu
