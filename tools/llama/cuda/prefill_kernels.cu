#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/reduce.cuh"

namespace keyhole::tools::cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline float joined(const Split& numbers, size_t i) {
  const float high = __bfloat162float(numbers.high[i]);
  return numbers.low == nullptr ? high : high + __bfloat162float(numbers.low[i]);
}
__device__ inline void write_split(const SplitOut& out, size_t i, float x) {
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  out.high[i] = high;
  out.low[i] = __float2bfloat16_rn(x - __bfloat162float(high));
}
__device__ inline __half rounded(float x) {
  return __float2half_rn(fminf(fmaxf(x, -65504.0F), 65504.0F));
}

__global__ void embed_kernel(const uint32_t* tokens, Split table, uint32_t width, float* hidden) {
  const size_t from = size_t{tokens[blockIdx.x]} * width;
  for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
    hidden[size_t{blockIdx.x} * width + i] = joined(table, from + i);
  }
}

__global__ void rope_table_kernel(const double* frequencies, uint32_t half, float2* table) {
  for (uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
    double sine, cosine;
    sincos(blockIdx.x * frequencies[i], &sine, &cosine);
    table[size_t{blockIdx.x} * half + i] =
        make_float2(static_cast<float>(cosine), static_cast<float>(sine));
  }
}

__global__ void normalise_kernel(const float* x, const float* weight, float eps, uint32_t width,
                                 SplitOut out) {
  const size_t row = size_t{blockIdx.x} * width;
  float squares = 0.0F;
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) squares += x[row + i] * x[row + i];
  const float scale = 1.0F / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(width) + eps);
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
    write_split(out, row + i, x[row + i] * scale * weight[i]);
  }
}

__global__ void rotate_kernel(Heads a) {
  const uint32_t d = a.head_dim;
  const uint32_t half = d / 2;
  const uint32_t heads = a.q_heads + 2 * a.kv_heads;
  const size_t token = blockIdx.x;
  const float* const from = a.qkv + token * heads * d;
  const float2* const turns = a.table + token * half;
  for (uint32_t pair = threadIdx.x; pair < heads * half; pair += blockDim.x) {
    const uint32_t head = pair / half;
    const uint32_t i = pair % half;
    float low = from[head * d + i];
    float high = from[head * d + i + half];
    if (head < a.q_heads + a.kv_heads) {
      const float2 turn = turns[i];
      const float turned = low * turn.x - high * turn.y;
      high = high * turn.x + low * turn.y;
      low = turned;
    }
    __half* to;
    float* out;
    size_t at;
    if (head < a.q_heads) {
      to = a.q;
      out = a.q_out;
      at = (token * a.q_heads + head) * d + i;
    } else {
      const bool key = head < a.q_heads + a.kv_heads;
      to = key ? a.k : a.v;
      out = key ? a.k_out : a.v_out;
      at = (token * a.kv_heads + head - a.q_heads - (key ? 0 : a.kv_heads)) * d + i;
    }
    to[at] = rounded(low);
    to[at + half] = rounded(high);
    if (out != nullptr) {
      out[at] = low;
      out[at + half] = high;
    }
  }
}

__global__ void silu_kernel(const float* gate_up, uint32_t inner, SplitOut out) {
  const float* const gate = gate_up + size_t{blockIdx.x} * 2 * inner;
  for (uint32_t i = threadIdx.x; i < inner; i += blockDim.x) {
    const float x = gate[i];
    write_split(out, size_t{blockIdx.x} * inner + i, x / (1.0F + __expf(-x)) * gate[inner + i]);
  }
}

}  // namespace

void embed_tokens(const uint32_t* tokens, uint32_t n, const Split& table, uint32_t width,
                  float* hidden, cudaStream_t stream) {
  embed_kernel<<<n, kThreads, 0, stream>>>(tokens, table, width, hidden);
  check_launch("embedding");
}

void rope_table(const double* frequencies, uint32_t half, uint32_t n, float2* table,
                cudaStream_t stream) {
  rope_table_kernel<<<n, 64, 0, stream>>>(frequencies, half, table);
  check_launch("RoPE's table");
}

void normalise_tokens(const float* x, const float* weight, float eps, uint32_t n, uint32_t width,
                      const SplitOut& out, cudaStream_t stream) {
  normalise_kernel<<<n, kThreads, 0, stream>>>(x, weight, eps, width, out);
  check_launch("norm");
}

void rotate_heads(const Heads& heads, cudaStream_t stream) {
  rotate_kernel<<<heads.n, kThreads, 0, stream>>>(heads);
  check_launch("RoPE");
}

void silu_multiply_tokens(const float* gate_up, uint32_t n, uint32_t inner, const SplitOut& out,
                          cudaStream_t stream) {
  silu_kernel<<<n, kThreads, 0, stream>>>(gate_up, inner, out);
  check_launch("SiLU");
}

}  // namespace keyhole::tools::cuda
