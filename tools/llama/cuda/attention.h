// Exact causal attention of a stretch of a prompt, as in fp32: tensor cores multiply numbers that are sums of two
// fp16. With single fp16 numbers the library attends (tools/llama/cuda/prompt_attention.h).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// The arguments: queries at positions [first, first + queries) attend to all keys up to their own position, or to
/// the last `window` of these.
struct AttentionArgs {
  const __half* q = nullptr;  ///< `[queries, q_heads, d]`
  const __half* k = nullptr;  ///< `[first + queries, kv_heads, d]`
  const __half* v = nullptr;  ///< `[first + queries, kv_heads, d]`
  // What q, k and v lack of the numbers that they stand for, in the same shapes.
  const __half* q_low = nullptr;
  const __half* k_low = nullptr;
  const __half* v_low = nullptr;
  SplitOut out;  ///< `[queries, q_heads, d]`
  uint32_t first = 0;
  uint32_t queries = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  float scale = 0.0F;    ///< of the logits
  float softcap = 0.0F;  ///< c > 0: logit = c * tanh(scale * q.k / c)
  uint32_t window = 0;   ///< 0: all
};

/// Whether there is a kernel for this head dimension: 64, 80, 96, 128, 256 have one.
[[nodiscard]] bool attention_has(uint32_t head_dim);

/// Enqueues the attention. Sums are fp32 and softmax weights are sums of two fp16, too: the relative error is some
/// 1e-6.
void causal_attention(const AttentionArgs& args, uint32_t head_dim, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
