// Decoding with a Llama whose KV cache is Keyhole's.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/llama/keyhole_cache.h"
#include "tools/llama/prefill.h"
#include "tools/llama/rope.h"
#include "tools/llama/team.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

/// Where the wall time of the decoding steps went, in seconds.
struct StepTimes {
  uint64_t steps = 0;
  double attention = 0.0;    ///< inside Keyhole
  double projections = 0.0;  ///< q, k, v and output projections, norms, RoPE
  double mlp = 0.0;
  double logits = 0.0;  ///< final norm and output projection

  [[nodiscard]] double total() const { return attention + projections + mlp + logits; }
};

/// One sequence: a prompt, then a token at a time. A step allocates nothing.
class Decoder {
 public:
  /// Borrows all three. The cache holds `tokens` tokens.
  Decoder(const LlamaModel& model, KeyholeCache& cache, Team& team, uint32_t tokens = 0);

  /// Runs the prompt and fills the cache; call it once, before any step. Returns the logits that follow.
  /// The index is not built: see KeyholeCache::build.
  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress = {});

  /// Appends one token; returns the logits `[vocab]` of the next, valid until the next call.
  std::span<const float> step(uint32_t token);

  /// Forgets all tokens from `tokens` on, so that another continuation can follow.
  void truncate(uint32_t tokens);

  /// Number of tokens so far: the position of the next.
  [[nodiscard]] uint32_t tokens() const { return tokens_; }

  /// Called in each step after each layer's attention with its queries and output, `[Hq, d]`; its time is
  /// not counted in times(). It may attend again. Empty: none.
  using AttentionHook = std::function<void(uint32_t layer, const float* q, const float* out)>;
  void set_attention_hook(AttentionHook hook) { hook_ = std::move(hook); }

  [[nodiscard]] const StepTimes& times() const { return times_; }
  void reset_times() { times_ = {}; }

 private:
  void multiply(const Matrix& matrix, const float* x, float* y);
  void normalise(const std::vector<float>& weight);

  const LlamaModel& model_;
  KeyholeCache& cache_;
  Team& team_;
  Rope rope_;
  uint32_t tokens_ = 0;
  AttentionHook hook_;
  StepTimes times_;
  std::vector<float> hidden_, normed_, qkv_, attended_, gate_up_, update_, logits_;
  std::vector<float> cosines_, sines_;
};

/// The index of the largest logit; the first of equal ones.
[[nodiscard]] uint32_t greedy(std::span<const float> logits);

}  // namespace keyhole::tools
