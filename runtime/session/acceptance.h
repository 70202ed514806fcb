// Acceptance (keyhole_session_accept): cuts and reorders what an extension of all layers has appended.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/session/extended_tokens.h"
#include "runtime/session/session_tokens.h"
#include "runtime/session/stream_stepper.h"

namespace keyhole::runtime {

class Acceptance {
 public:
  /// All that it is given outlives it; of params the window counts.
  Acceptance(const Engine& engine, const SessionParams& params, Sequence& sequence,
             SessionTokens& tokens, ExtendedTokens& extended, StreamStepper& stream)
      : engine_(&engine),
        params_(&params),
        sequence_(&sequence),
        tokens_(&tokens),
        extended_(&extended),
        stream_(&stream) {}

  /// Keeps those of the tokens appended last whose numbers are in `path` `[m]`, with null the first m. Takes effect in
  /// the order of the stream where the tokens were appended there and still lie in the window, else on the host when
  /// the stream is idle. Returns how many tokens, from the first one of a layer on, are what they were. Throws Error,
  /// and then has changed nothing.
  uint32_t accept(uint32_t m, const uint32_t* path);

 private:
  using Extended = ExtendedTokens::Extended;
  /// Whether all layers that took part have so many of the newest tokens on the device.
  [[nodiscard]] bool drops_on_device(uint32_t newest) const;
  /// Throws Error(invalid_argument) where a layer cannot keep the first `prefix` new tokens and move others up behind
  /// them.
  void check_drop(const Extended& e, uint32_t prefix, const std::vector<uint32_t>& moved) const;
  void accept_on_host(const Extended& e, uint32_t m, const uint32_t* path);
  void accept_on_stream(const Extended& e, uint32_t m, const uint32_t* path);

  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  SessionTokens* tokens_;
  ExtendedTokens* extended_;
  StreamStepper* stream_;
};

}  // namespace keyhole::runtime
