// Attention of a prompt on the host by the library, over the blocks of tokens that matter.
#pragma once

#include <keyhole/prefill.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/api/handles.h"
#include "tools/llama/config.h"
#include "tools/llama/prefill.h"

namespace keyhole::tools {

using PromptHandle = std::unique_ptr<keyhole_prompt, Destroy<keyhole_prompt_destroy>>;

/// Makes a prompt by `pattern`. Throws LibraryError.
[[nodiscard]] PromptHandle make_prompt(const Engine& engine, const std::string& pattern);

/// Describes dense rows of fp32 `[tokens, heads, dim]` in host memory, `width` elements between tokens.
[[nodiscard]] keyhole_tensor host_rows(const float* data, size_t tokens, uint32_t heads,
                                       uint32_t dim, size_t width);

[[nodiscard]] PromptBlocks blocks_of(const PromptHandle& prompt);

/// Attention of a model's prompts. It has an engine of its own, because prompts need no session.
class HostPrompt {
 public:
  /// pattern: as in keyhole_prompt_create(). threads: 0 for one per core. Throws LibraryError.
  HostPrompt(const LlamaConfig& model, const std::string& pattern, uint32_t threads);

  /// Attends with queries `[n, q_heads, d]` of the last n of m tokens, whose k and v are `[m, kv_heads, d]`; out `[n,
  /// q_heads, d]`, which may be q. Returns when it is done.
  void attend(uint32_t layer, size_t n, size_t m, const float* q, const float* k, const float* v,
              float* out);
  [[nodiscard]] PromptBlocks blocks() const { return blocks_of(prompt_); }

 private:
  uint32_t q_heads_, kv_heads_, head_dim_;
  std::vector<uint32_t> places_;  ///< the engine's number of each layer
  Engine engine_;
  PromptHandle prompt_;
};

/// The relative errors |o - o*| / |o*| of a layer's outputs, by token and query head, against exact ones, `[rows,
/// dim]`.
[[nodiscard]] std::vector<double> row_errors(const float* out, const float* exact, size_t rows,
                                             uint32_t dim);

}  // namespace keyhole::tools
