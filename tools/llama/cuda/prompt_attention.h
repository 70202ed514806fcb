// Attention of a prompt by the library, exact or over the blocks of tokens that matter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <keyhole/prefill.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/api/handles.h"
#include "tools/llama/config.h"
#include "tools/llama/cuda/kv_numbers.h"

namespace keyhole::tools::cuda {

/// Attention of a model's prompts. It has an engine of its own, because prompts need no session.
class PromptAttention {
 public:
  /// pattern: as in keyhole_prompt_create(). numbers: of q, k and v, f16 or f32. Throws LibraryError.
  PromptAttention(const LlamaConfig& model, const std::string& pattern,
                  KvNumbers numbers = KvNumbers::f16);

  /// Enqueues attention of queries `[n, q_heads, d]` of the last n of m tokens, whose k and v are `[m, kv_heads, d]`;
  /// out `[n, q_heads, d]`, in f32 or rounded.
  void attend(uint32_t layer, size_t n, size_t m, const void* q, const void* k, const void* v,
              float* out, cudaStream_t stream) {
    attend(layer, n, m, q, k, v, out, KEYHOLE_F32, stream);
  }
  void attend(uint32_t layer, size_t n, size_t m, const void* q, const void* k, const void* v,
              __nv_bfloat16* out, cudaStream_t stream) {
    attend(layer, n, m, q, k, v, out, KEYHOLE_BF16, stream);
  }
  /// The share of the blocks seen by queries that they attended, where that was chosen; otherwise 1. Waits.
  [[nodiscard]] double share() const;

 private:
  void attend(uint32_t layer, size_t n, size_t m, const void* q, const void* k, const void* v,
              void* out, keyhole_dtype out_dtype, cudaStream_t stream);
  struct Destroy {
    void operator()(keyhole_prompt* prompt) const { keyhole_prompt_destroy(prompt); }
  };
  uint32_t q_heads_, kv_heads_, head_dim_;
  keyhole_dtype dtype_;
  std::vector<uint32_t> places_;  ///< the engine's number of each layer
  Engine engine_;
  std::unique_ptr<keyhole_prompt, Destroy> prompt_;
};

}  // namespace keyhole::tools::cuda
