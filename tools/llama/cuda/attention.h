// Exact causal attention of a stretch of a prompt, on tensor cores.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// Queries at positions [first, first + queries) attend to all keys up to their own position.
struct AttentionArgs {
  const __half* q = nullptr;  ///< `[queries, q_heads, d]`
  const __half* k = nullptr;  ///< `[first + queries, kv_heads, d]`
  const __half* v = nullptr;  ///< `[first + queries, kv_heads, d]`
  SplitOut out;               ///< `[queries, q_heads, d]`
  uint32_t first = 0;
  uint32_t queries = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  float scale = 0.0F;  ///< of the logits
};

/// Whether there is a kernel for this head dimension: 64, 80, 96, 128, 256.
[[nodiscard]] bool attention_has(uint32_t head_dim);

/// Enqueues. Sums in fp32; logits of fp16 operands, softmax weights rounded to fp16: relative error some 5e-4.
void causal_attention(const AttentionArgs& args, uint32_t head_dim, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
