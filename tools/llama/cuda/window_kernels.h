// One token of a layer with a sliding window: K and V into the layer's ring, and attention over what it holds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/cuda/kv_numbers.h"

namespace keyhole::tools::cuda {

/// K and V `[slots, kv_heads, d]` of `numbers`: token t lies in slot t % slots. d is even, at most 256.
struct WindowRing {
  void* k = nullptr;
  void* v = nullptr;
  KvNumbers numbers = KvNumbers::f32;
  uint32_t slots = 0;
  uint32_t window = 0;  ///< token t attends to tokens from t + 1 - window on
  uint32_t kv_heads = 0, head_dim = 0;
};

/// All in device memory, fp32.
struct WindowStep {
  const float* q = nullptr;  ///< `[q_heads, d]`
  const float* k = nullptr;  ///< `[kv_heads, d]`; null: the token is there already
  const float* v = nullptr;
  float* out = nullptr;                ///< `[q_heads, d]`
  const uint32_t* position = nullptr;  ///< of the token
  uint32_t q_heads = 0;
  float scale = 0.0F;        ///< of the logits
  float softcap = 0.0F;      ///< 0: none
  float* partial = nullptr;  ///< room for window_partial_floats()
};

/// `[q_heads, parts, d + 2]`: each part's largest logit, sum of weights, and weighted values.
[[nodiscard]] size_t window_partial_floats(uint32_t q_heads, uint32_t head_dim);

/// Enqueues: three kernels, the same in each step, so that they can be captured.
void window_attend(const WindowRing& ring, const WindowStep& step, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
