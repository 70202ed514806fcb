// Tokens of prompts that come in device memory (keyhole_session_append): by way of host memory, where their session
// stores them, or of sliding layers from device memory to device memory.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/extended_tokens.h"
#include "runtime/session/prompt_memory.h"
#include "runtime/session/session_tokens.h"
#include "runtime/session/stream_stepper.h"

namespace keyhole::runtime {

class DevicePrompts {
 public:
  /// All that it is given outlives it; of params max_tokens counts.
  DevicePrompts(const Engine& engine, const SessionParams& params, Sequence& sequence,
                const IndexKeeper& keeper, SessionTokens& tokens, StreamStepper& stream,
                PromptMemory& memory, ExtendedTokens& extended)
      : engine_(&engine),
        params_(&params),
        sequence_(&sequence),
        keeper_(&keeper),
        tokens_(&tokens),
        stream_(&stream),
        memory_(&memory),
        extended_(&extended) {}

  /// Does what SessionTokens::prefill() does for tensors of which some lie in device memory. Waits for the stream.
  void prefill(uint32_t layer, const TensorView& k, const TensorView& v, const TensorView* q);

  /// The same in two halves, in a layer that offloads: tokens in host memory, until bring() is called again, and
  /// storing them. stream: after which they may be read; bring() waits for it.
  struct Brought {
    TensorView k, v;
    std::optional<TensorView> q;  ///< of the sample; none: it has none of these tokens
    TokenSample sample;
  };
  [[nodiscard]] Brought bring(uint32_t layer, const TensorView& k, const TensorView& v,
                              const TensorView* q, gpu::Stream stream);
  void store(uint32_t layer, const Brought& tokens) {
    tokens_->prefill(layer, tokens.k, tokens.v, tokens.q ? &*tokens.q : nullptr, tokens.sample);
  }

  /// Again in two halves, of tokens without queries: see SessionTokens::take_in(). beside: of
  /// stream_beside(), from before the stream was given what the first half may run beside.
  [[nodiscard]] gpu::Stream stream_beside();
  void take_in(uint32_t layer, const TensorView& k, const TensorView& v, gpu::Stream beside);
  void finish_taking_in(uint32_t layer) { tokens_->finish_taking_in(layer); }

 private:
  /// Stores tokens of a sliding layer on the device; false: they are to come by way of host memory, and nothing has
  /// changed.
  [[nodiscard]] bool prefill_window(uint32_t layer, const TensorView& k, const TensorView& v,
                                    const TensorView* q);

  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  const IndexKeeper* keeper_;
  SessionTokens* tokens_;
  StreamStepper* stream_;
  PromptMemory* memory_;
  ExtendedTokens* extended_;
};

}  // namespace keyhole::runtime
