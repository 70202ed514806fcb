// A decoder that computes on the CPU.
#pragma once

#include <vector>

#include "tools/llama/decoder.h"
#include "tools/llama/host_extension.h"
#include "tools/llama/keyhole_cache.h"
#include "tools/llama/layer_math.h"
#include "tools/llama/rope.h"
#include "tools/llama/team.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

class HostDecoder final : public Decoder {
 public:
  /// Borrows the model, the cache and the team. hooks: those of prompts to come.
  HostDecoder(const LlamaModel& model, KeyholeCache& cache, Team& team, HeldTokens held = {},
              PrefillHooks hooks = {});

  using Decoder::prefill;
  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress) override;
  std::span<const float> step(uint32_t token) override;
  std::span<const float> extend(std::span<const uint32_t> tokens) override;
  void extend_each(std::span<const uint32_t> tokens, std::vector<float>& logits) override;
  [[nodiscard]] size_t tokens_at_once() const override;
  void take_at_once(size_t tokens) override { at_once_ = tokens; }
  [[nodiscard]] size_t worth_in_prefill(size_t tokens) const override;
  void truncate(uint32_t tokens) override;
  [[nodiscard]] uint32_t tokens() const override { return tokens_; }
  [[nodiscard]] size_t rope_tokens() const override { return rope_tokens_; }
  [[nodiscard]] bool turns_otherwise(size_t tokens) const override;
  void set_attention_hook(AttentionHook hook) override { hook_ = std::move(hook); }
  [[nodiscard]] const StepTimes& times() const override { return times_; }
  void reset_times() override { times_ = {}; }

 private:
  /// Takes up to at_once_ tokens together.
  std::vector<float> take_together(std::span<const uint32_t> tokens, LogitsOf which);

  /// RoPE of one kind of layer, and its turn of this step.
  struct Turn {
    Rope rope;
    std::vector<float> cosines, sines;
    Turn(uint32_t head_dim, const RopeSettings& settings, size_t rope_tokens);
    void set(uint32_t position);
  };

  const LlamaModel& model_;
  KeyholeCache& cache_;
  Team& team_;
  LayerMath math_;
  Turn full_, sliding_;
  uint32_t tokens_;
  size_t rope_tokens_;
  size_t at_once_;
  PrefillHooks hooks_;
  AttentionHook hook_;
  StepTimes times_;
  std::vector<float> hidden_, normed_, qkv_, attended_, gate_up_, update_, logits_;
};

}  // namespace keyhole::tools
