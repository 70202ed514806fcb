// A decoder that computes on a GPU. No CUDA in this header.
#pragma once

#include <memory>

#include "tools/llama/decoder.h"
#include "tools/llama/gpu_model.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// Decodes on a GPU. With a cache on the same GPU a whole step is enqueued, attention included, mostly as a CUDA
/// graph, and waited for once. With a cache on the host, or a hook, q, k and v of each layer come to the host and the
/// output goes back: some 20 us a layer.
class GpuDecoder final : public Decoder {
 public:
  /// Borrows the model and the cache.
  GpuDecoder(const GpuModel& model, KeyholeCache& cache, HeldTokens held = {});
  ~GpuDecoder() override;

  using Decoder::prefill;
  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress) override;
  std::span<const float> step(uint32_t token) override;
  /// Computes the products of all tokens together, so that the weights are read once, and attention through the
  /// cache, token by token. With a hook it goes by steps.
  std::span<const float> extend(std::span<const uint32_t> tokens) override;
  [[nodiscard]] size_t tokens_at_once() const override;
  void take_at_once(size_t tokens) override;
  void truncate(uint32_t tokens) override;
  [[nodiscard]] uint32_t tokens() const override;
  [[nodiscard]] size_t rope_tokens() const override;
  [[nodiscard]] bool turns_otherwise(size_t tokens) const override;
  void set_attention_hook(AttentionHook hook) override;
  /// Times of projections, MLP and logits by the GPU's clock in every 8th step; attention is the rest of the wall
  /// time.
  [[nodiscard]] const StepTimes& times() const override;
  void reset_times() override;

 private:
  class Steps;
  std::unique_ptr<Steps> steps_;
};

}  // namespace keyhole::tools
