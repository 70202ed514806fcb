// The forward pass over a whole prompt, layer by layer.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/llama/team.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

/// Keys, values and queries of consecutive tokens of one layer, after RoPE, dense and row-major. Borrowed: valid
/// during the call that hands them over.
struct LayerChunk {
  uint32_t layer = 0;
  size_t first_token = 0;
  size_t tokens = 0;
  const float* q = nullptr;  ///< `[tokens, Hq, d]`
  const float* k = nullptr;  ///< `[tokens, Hkv, d]`
  const float* v = nullptr;  ///< `[tokens, Hkv, d]`
};

/// A LayerChunk in the memory of a GPU, for a cache that lies there, too.
struct DeviceLayerChunk {
  uint32_t layer = 0;
  size_t first_token = 0;
  size_t tokens = 0;
  ElementType type = ElementType::f32;  ///< of k and v: f32, f16 or bf16
  const void* q = nullptr;              ///< f16, or f32 where k and v are
  const void* k = nullptr;
  const void* v = nullptr;
  /// k and v lie in pinned memory of the host, q on the GPU: of a layer whose tokens a cache offloads. They are
  /// `[tokens, heads, d]` of the sink's KvShare then, whose tokens alone were brought: finite numbers without a meaning
  /// stand for the others.
  bool kv_on_host = false;
};

/// Receives every chunk of every layer once, layers and tokens in rising order, on the calling thread.
using LayerSink = std::function<void(const LayerChunk&)>;
/// Called on the calling thread with the share of the work that is done, 0..1, rising.
using PrefillProgress = std::function<void(double fraction)>;

/// Attends in place of exact attention: q `[tokens - first, Hq, d]` of the tokens from `first` up to `tokens` becomes
/// their output; k and v are of all `tokens`. Called layer by layer, tokens in rising order; not for sliding layers,
/// nor for the last layer, where only one token attends.
using PromptAttend = std::function<void(uint32_t layer, size_t first, size_t tokens, float* q,
                                        const float* k, const float* v)>;
/// Numbers of blocks of 64 tokens that queries have attended, and that they saw.
struct PromptBlocks {
  uint64_t attended = 0, seen = 0;

  /// The attended share of the blocks; 1 where nothing was chosen.
  [[nodiscard]] double share() const {
    return seen == 0 ? 1.0 : static_cast<double>(attended) / static_cast<double>(seen);
  }
};

/// The seconds of a prompt's stages.
struct PrefillTimes {
  double weights = 0;      ///< to fp32
  double projections = 0;  ///< embedding, norms, q, k and v, RoPE
  double hand_over = 0;    ///< to the sink
  double attention = 0;
  double mlp = 0;  ///< and what follows attention
  double logits = 0;
};
struct PrefillHooks {
  PromptAttend attend;  ///< of prompts of more tokens than `beyond`; empty: exact attention
  size_t beyond = 0;
  size_t chunk = 0;               ///< queries of one call at most; 0: all of a layer
  PrefillTimes* times = nullptr;  ///< written; null: not wanted
};

/// Runs the prompt through the model and returns the logits `[vocab]` that follow its last token.
///
/// Only one layer's q, K and V exist at a time, beside the hidden states of all tokens. The last layer
/// computes attention and MLP for the last token only: nothing else of them is ever read, which saves
/// 1 / layers of the attention, the larger part of a long prefill.
/// Throws std::runtime_error for an empty prompt or a token that is not in the vocabulary.
[[nodiscard]] std::vector<float> prefill(const LlamaModel& model, Team& team,
                                         std::span<const uint32_t> tokens, const LayerSink& sink,
                                         const PrefillProgress& progress = {},
                                         const PrefillHooks& hooks = {});

/// Throws if a token is not in the vocabulary; the text names its place and the size of the vocabulary.
void check_tokens(const LlamaConfig& config, std::span<const uint32_t> tokens);

}  // namespace keyhole::tools
