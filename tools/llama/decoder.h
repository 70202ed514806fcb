// Decoding with a model whose KV cache is Keyhole's: the interface of every decoder, wherever it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/llama/prefill.h"

namespace keyhole::tools {

/// Where the wall time of the decoding steps went, in seconds.
struct StepTimes {
  uint64_t steps = 0;
  double attention = 0.0;    ///< inside Keyhole, and on the way there and back
  double projections = 0.0;  ///< q, k, v and output projections, norms, RoPE
  double mlp = 0.0;
  double logits = 0.0;  ///< final norm and output projection

  [[nodiscard]] double total() const { return attention + projections + mlp + logits; }
};

/// The content of a cache when a decoder begins: `count` tokens, with the RoPE frequencies of a sequence of
/// `rope_tokens` tokens (Decoder::rope_tokens()). Where only the number of tokens is given, the frequencies are those
/// of one prompt.
struct HeldTokens {
  uint32_t count = 0;
  size_t rope_tokens = 0;
  HeldTokens(uint32_t tokens = 0)
      : HeldTokens(tokens, tokens) {}  // NOLINT(google-explicit-constructor)
  HeldTokens(uint32_t tokens, size_t rope) : count(tokens), rope_tokens(rope) {}
};

/// Decodes one sequence: a prompt, then a token at a time. A step allocates nothing.
class Decoder {
 public:
  virtual ~Decoder() = default;

  /// Runs the prompt and fills the cache; call it once, before any step. Returns the logits that follow.
  /// The index is not built: see KeyholeCache::build.
  virtual std::span<const float> prefill(std::span<const uint32_t> tokens,
                                         const PrefillProgress& progress) = 0;
  std::span<const float> prefill(std::span<const uint32_t> tokens) { return prefill(tokens, {}); }

  /// Appends one token; returns the logits `[vocab]` of the next, valid until the next call.
  virtual std::span<const float> step(uint32_t token) = 0;

  /// Appends tokens as steps do, up to tokens_at_once() of them; returns the logits that follow the last. The hook is
  /// not called for tokens taken together, and times() does not count them. Where it throws, tokens() says how many
  /// tokens are there.
  virtual std::span<const float> extend(std::span<const uint32_t> tokens);
  /// extend() that writes the logits behind each of the tokens to `logits`, `[tokens, vocab]`: what drafts are held
  /// against. One token after the other where the decoder does not compute these logits together.
  virtual void extend_each(std::span<const uint32_t> tokens, std::vector<float>& logits);
  /// The number of tokens that extend() takes together rather than one after the other; 1: taking more would gain
  /// nothing.
  [[nodiscard]] virtual size_t tokens_at_once() const { return 1; }
  /// Sets that number, at least 1; more take more memory while extend() lasts. Decoders for which nothing is gained
  /// ignore it.
  virtual void take_at_once(size_t /*tokens*/) {}

  /// About how many tokens of a prefill take the time of `tokens` tokens behind those that are there. A step takes
  /// that of at least 16, because it reads every weight for one token: some 10 for the bundled model on 2 cores, 50
  /// and more for an 8B model on a GPU.
  static constexpr size_t kPrefilledTokensPerStep = 16;
  [[nodiscard]] virtual size_t worth_in_prefill(size_t tokens) const {
    return tokens * kPrefilledTokensPerStep;
  }

  /// Forgets all tokens from `tokens` on, so that another continuation can follow. Throws std::runtime_error where
  /// layers with a sliding window cannot go back so far (kWindowSlack).
  virtual void truncate(uint32_t tokens) = 0;

  /// Number of tokens so far: the position of the next.
  [[nodiscard]] virtual uint32_t tokens() const = 0;

  /// The length of a sequence by which RoPE's frequencies for the present tokens were chosen: that of the prompt, or
  /// of the longer sequence that was cut back. It matters to LongRoPE alone.
  [[nodiscard]] virtual size_t rope_tokens() const { return tokens(); }
  /// Whether a sequence of `tokens` tokens has other frequencies than the present one: LongRoPE's, on the other side
  /// of the original context. Keys of both do not go together: truncate(0) and prefill() take all anew, as
  /// transformers does. A step or extend() past that end throws std::runtime_error.
  [[nodiscard]] virtual bool turns_otherwise(size_t /*tokens*/) const { return false; }

  /// Called in each step after the attention of each layer that is Keyhole's with its queries and output, `[Hq, d]`, in
  /// host memory; its time is not counted in times(). It may attend again. Empty: none.
  using AttentionHook = std::function<void(uint32_t layer, const float* q, const float* out)>;
  virtual void set_attention_hook(AttentionHook hook) = 0;

  [[nodiscard]] virtual const StepTimes& times() const = 0;
  virtual void reset_times() = 0;
};

/// The index of the largest logit; the first of equal ones.
[[nodiscard]] uint32_t greedy(std::span<const float> logits);

}  // namespace keyhole::tools
