// What prefill does between its products: a token at a time, all of them side by side. All enqueue.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// hidden `[n, width]` = rows of the table `[vocab, width]`.
void embed_tokens(const uint32_t* tokens, uint32_t n, const Split& table, uint32_t width,
                  float* hidden, cudaStream_t stream);

/// (cos, sin) of position * frequency, `[n, half]`, for positions 0..n-1; the angle in double.
void rope_table(const double* frequencies, uint32_t half, uint32_t n, float2* table,
                cudaStream_t stream);

/// out `[n, width]` = x / sqrt(mean(x^2) + eps) * weight.
void normalise_tokens(const float* x, const float* weight, float eps, uint32_t n, uint32_t width,
                      const SplitOut& out, cudaStream_t stream);

/// Where the queries, keys and values of n tokens go.
struct Heads {
  const float* qkv = nullptr;     ///< `[n, (q_heads + 2 kv_heads) * d]`
  const float2* table = nullptr;  ///< of rope_table(), from the first token's row on
  uint32_t n = 0;
  uint32_t q_heads = 0, kv_heads = 0, head_dim = 0;
  // For attention, rounded to fp16 (beyond its range: to its largest number):
  __half* q = nullptr;  ///< `[n, q_heads, d]`
  __half* k = nullptr;  ///< `[n, kv_heads, d]`
  __half* v = nullptr;
  // For the KV cache, as they are; null: not wanted:
  float* q_out = nullptr;
  float* k_out = nullptr;
  float* v_out = nullptr;
};
/// Turns q and k by RoPE (rotate-half) and hands all three out.
void rotate_heads(const Heads& heads, cudaStream_t stream);

/// out `[n, inner]` = silu(gate) * up, of gate_up `[n, 2 inner]`.
void silu_multiply_tokens(const float* gate_up, uint32_t n, uint32_t inner, const SplitOut& out,
                          cudaStream_t stream);

}  // namespace keyhole::tools::cuda
