#include <cmath>

#include "tools/llama/cuda/activation.cuh"
#include "tools/llama/cuda/kv_numbers.cuh"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/reduce.cuh"

namespace keyhole::tools::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ inline float joined(const Split& numbers, size_t i) {
  const float high = __bfloat162float(numbers.high[i]);
  return numbers.low == nullptr ? high : high + __bfloat162float(numbers.low[i]);
}

/// Four bf16 at once, 8 bytes.
struct alignas(8) Bf16x4 {
  __nv_bfloat162 first, second;
};
/// Writes elements [i, i + 4); i a multiple of 4. Without a low part they are rounded.
__device__ inline void write_split(const SplitOut& out, size_t i, const float4& x) {
  const Bf16x4 high{__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
  *reinterpret_cast<Bf16x4*>(out.high + i) = high;
  if (out.low == nullptr) return;
  *reinterpret_cast<Bf16x4*>(out.low + i) = {
      __floats2bfloat162_rn(x.x - __low2float(high.first), x.y - __high2float(high.first)),
      __floats2bfloat162_rn(x.z - __low2float(high.second), x.w - __high2float(high.second))};
}
__device__ inline float4 four(const float* x, size_t i) {
  return *reinterpret_cast<const float4*>(x + i);
}

__device__ inline float4 four(const __nv_bfloat16* x, size_t i) {
  const Bf16x4 both = *reinterpret_cast<const Bf16x4*>(x + i);
  const float2 first = __bfloat1622float2(both.first), second = __bfloat1622float2(both.second);
  return make_float4(first.x, first.y, second.x, second.y);
}

__device__ inline float within_half(float x) { return fminf(fmaxf(x, -65504.0F), 65504.0F); }

__global__ void embed_kernel(const uint32_t* tokens, Split table, uint32_t width, float scale,
                             float* hidden) {
  const size_t from = size_t{tokens[blockIdx.x]} * width;
  for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
    hidden[size_t{blockIdx.x} * width + i] = scale * joined(table, from + i);
  }
}

__global__ void rope_table_kernel(const double* frequencies, uint32_t pairs, double factor,
                                  uint32_t first, float2* table) {
  for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    double sine, cosine;
    sincos((first + blockIdx.x) * frequencies[i], &sine, &cosine);
    table[size_t{blockIdx.x} * pairs + i] =
        make_float2(static_cast<float>(factor * cosine), static_cast<float>(factor * sine));
  }
}

__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const float* x, const float* weight, float eps, uint32_t width, SplitOut out) {
  const size_t row = size_t{blockIdx.x} * width;
  float squares = 0.0F;
  for (uint32_t i = threadIdx.x * 4; i < width; i += kThreads * 4) {
    const float4 a = four(x, row + i);
    squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
  }
  const float scale = 1.0F / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(width) + eps);
  for (uint32_t i = threadIdx.x * 4; i < width; i += kThreads * 4) {
    const float4 a = four(x, row + i);
    const float4 w = four(weight, i);
    write_split(
        out, row + i,
        make_float4(a.x * scale * w.x, a.y * scale * w.y, a.z * scale * w.z, a.w * scale * w.w));
  }
}

/// A block has kWarps heads of one token.
__global__ void __launch_bounds__(kThreads) heads_kernel(const Heads a) {
  const uint32_t d = a.head_dim;
  const uint32_t heads = a.q_heads + 2 * a.kv_heads;
  const uint32_t lane = threadIdx.x % 32;
  const size_t token = blockIdx.x;
  const float2* const turns = a.table + token * a.pairs;
  const uint32_t head = blockIdx.y * kWarps + threadIdx.x / 32;
  if (head >= heads) return;
  const float* const from = a.qkv + (token * heads + head) * d;
  const float* const bias = a.bias == nullptr ? nullptr : a.bias + size_t{head} * d;
  const bool query = head < a.q_heads;
  const bool value = head >= a.q_heads + a.kv_heads;
  const float* const weight = query ? a.q_norm : value ? nullptr : a.k_norm;
  float scale = 1.0F;
  if (weight != nullptr) {
    float squares = 0.0F;
    for (uint32_t i = lane; i < d; i += 32) {
      const float x = from[i] + (bias == nullptr ? 0.0F : bias[i]);
      squares += x * x;
    }
    scale = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(d) + a.eps);
  }
  const auto component = [&](uint32_t i) {
    const float x = from[i] + (bias == nullptr ? 0.0F : bias[i]);
    return weight == nullptr ? x : x * scale * weight[i];
  };
  const auto turned = [&](uint32_t i) {
    const float x = component(i);
    if (value || i >= 2 * a.pairs) return x;
    if (i < a.pairs) return x * turns[i].x - component(i + a.pairs) * turns[i].y;
    const float2 turn = turns[i - a.pairs];
    return x * turn.x + component(i - a.pairs) * turn.y;
  };
  const uint32_t place = query ? head : value ? head - a.q_heads - a.kv_heads : head - a.q_heads;
  const size_t at = (token * (query ? a.q_heads : a.kv_heads) + place) * d;
  void* const to = query ? a.q : value ? a.v : a.k;
  void* const out = query ? a.q_out : value ? a.v_out : a.k_out;
  for (uint32_t i = 2 * lane; i < d; i += 64) {
    const float x = turned(i);
    const float y = turned(i + 1);
    const __half2 rounded = __floats2half2_rn(within_half(x), within_half(y));
    if (to != nullptr && a.attended == KvNumbers::f16) {
      *reinterpret_cast<__half2*>(static_cast<__half*>(to) + at + i) = rounded;
    } else if (to != nullptr) {
      write_pair(static_cast<float*>(to), at + i, make_float2(x, y));
    }
    if (out == nullptr) continue;
    if (query && a.numbers != KvNumbers::f32) {
      *reinterpret_cast<__half2*>(static_cast<__half*>(out) + at + i) = rounded;
    } else {
      write_pair(out, a.numbers, at + i, make_float2(x, y));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* x, size_t count, SplitOut out) {
  const size_t i = (size_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (i < count) write_split(out, i, four(x, i));
}

constexpr float kBinsOfOctave = 8.0F, kLowestOctave = -24.0F;

/// A row a warp.
__global__ void __launch_bounds__(kThreads)
    errors_kernel(const float* x, const float* truth, size_t rows, uint32_t dim, uint32_t* bins) {
  const size_t row = size_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float difference = 0.0F, norm = 0.0F;
  for (uint32_t i = threadIdx.x % 32 * 4; i < dim; i += 128) {
    const float4 a = four(x, row * dim + i), b = four(truth, row * dim + i);
    const float4 d = make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
    difference += d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w;
    norm += b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w;
  }
  for (int step = 16; step > 0; step /= 2) {
    difference += __shfl_xor_sync(0xFFFFFFFF, difference, step);
    norm += __shfl_xor_sync(0xFFFFFFFF, norm, step);
  }
  if (threadIdx.x % 32 != 0) return;
  const float octave = difference > 0.0F ? 0.5F * log2f(difference / norm) : kLowestOctave;
  const float bin = fminf(fmaxf((octave - kLowestOctave) * kBinsOfOctave, 0.0F), kErrorBins - 1.0F);
  atomicAdd(bins + static_cast<uint32_t>(bin), 1U);
}

template <class Number>
__global__ void __launch_bounds__(kThreads)
    activate_kernel(const Number* gate_up, const GateUp a, SplitOut out) {
  const uint32_t i = (blockIdx.y * kThreads + threadIdx.x) * 4;
  if (i >= a.inner) return;
  const size_t row = size_t{blockIdx.x} * 2 * a.inner;
  float4 gate = four(gate_up, row + i);
  float4 up = four(gate_up, row + a.inner + i);
  if (a.bias != nullptr) {
    const float4 g = four(a.bias, i);
    const float4 u = four(a.bias, a.inner + i);
    gate = make_float4(gate.x + g.x, gate.y + g.y, gate.z + g.z, gate.w + g.w);
    up = make_float4(up.x + u.x, up.y + u.y, up.z + u.z, up.w + u.w);
  }
  write_split(out, size_t{blockIdx.x} * a.inner + i,
              make_float4(activated(a.gelu, gate.x) * up.x, activated(a.gelu, gate.y) * up.y,
                          activated(a.gelu, gate.z) * up.z, activated(a.gelu, gate.w) * up.w));
}

}  // namespace

void embed_tokens(const uint32_t* tokens, uint32_t n, const Split& table, uint32_t width,
                  float scale, float* hidden, cudaStream_t stream) {
  embed_kernel<<<n, kThreads, 0, stream>>>(tokens, table, width, scale, hidden);
  check_launch("embedding");
}

void rope_table(const double* frequencies, uint32_t pairs, double factor, uint32_t first,
                uint32_t n, float2* table, cudaStream_t stream) {
  rope_table_kernel<<<n, 64, 0, stream>>>(frequencies, pairs, factor, first, table);
  check_launch("RoPE's table");
}

void normalise_tokens(const float* x, const float* weight, float eps, uint32_t n, uint32_t width,
                      const SplitOut& out, cudaStream_t stream) {
  normalise_kernel<<<n, kThreads, 0, stream>>>(x, weight, eps, width, out);
  check_launch("norm");
}

void finish_heads(const Heads& heads, cudaStream_t stream) {
  const uint32_t all = heads.q_heads + 2 * heads.kv_heads;
  heads_kernel<<<dim3(heads.n, (all + kWarps - 1) / kWarps), kThreads, 0, stream>>>(heads);
  check_launch("RoPE");
}

void split_numbers(const float* x, size_t count, const SplitOut& out, cudaStream_t stream) {
  const size_t blocks = (count / 4 + kThreads - 1) / kThreads;
  split_kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(x, count, out);
  check_launch("attention's split");
}

void count_errors(const float* x, const float* truth, size_t rows, uint32_t dim, uint32_t* bins,
                  cudaStream_t stream) {
  errors_kernel<<<static_cast<uint32_t>((rows + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
      x, truth, rows, dim, bins);
  check_launch("errors of attention");
}

double error_of_bin(uint32_t bin) {
  return std::exp2((bin + 1.0) / double{kBinsOfOctave} + double{kLowestOctave});
}

void activate_tokens(const GateUp& from, const SplitOut& out, cudaStream_t stream) {
  const dim3 grid(from.n, (from.inner + 4 * kThreads - 1) / (4 * kThreads));
  if (from.rounded != nullptr) {
    activate_kernel<<<grid, kThreads, 0, stream>>>(from.rounded, from, out);
  } else {
    activate_kernel<<<grid, kThreads, 0, stream>>>(from.gate_up, from, out);
  }
  check_launch("activation");
}

}  // namespace keyhole::tools::cuda
