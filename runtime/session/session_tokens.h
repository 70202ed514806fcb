// How tokens come to a session and go again: checked before anything changes, and told to every part that keeps
// something of them.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/audit/session_audits.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/extended_tokens.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/stream_stepper.h"

namespace keyhole::runtime {

/// Throws Error(invalid_argument) unless q holds as many tokens as k.
void check_as_many(const TensorView& q, const TensorView& k);

class SessionTokens {
 public:
  /// All that it is given outlives it; of params max_tokens counts.
  SessionTokens(const Engine& engine, const SessionParams& params, Sequence& sequence,
                IndexKeeper& keeper, SessionAudits& audits, const HostMemory& memory,
                StreamStepper& stream, ExtendedTokens& extended)
      : engine_(&engine),
        params_(&params),
        sequence_(&sequence),
        keeper_(&keeper),
        audits_(&audits),
        memory_(&memory),
        stream_(&stream),
        extended_(&extended) {}

  // Checks of tokens in host memory; those of several tokens run on the engine's threads.
  /// Throws Error where k and v hold different numbers of tokens, what is not finite, or more than there is room for.
  void check_append(uint32_t layer, const TensorView& k, const TensorView& v) const;
  /// Throws Error where max_tokens or host_memory_limit have no room for n tokens more.
  void check_room(uint32_t layer, uint32_t n) const;
  /// Throws Error(not_finite).
  void check_queries(const TensorView& q, const TokenSample& sample = {}) const;

  /// Stores tokens of a prompt, see keyhole_session_append. q: of all tokens, or of those that `sample` says, which are
  /// the ones that the index's sample may want; null: none.
  void prefill(uint32_t layer, const TensorView& k, const TensorView& v, const TensorView* q,
               const TokenSample& sample = {});
  /// The two halves of that for tokens without queries, whose pending codes may wait. The first one may run
  /// while the stream reads those codes and their rows, but no resident tokens.
  void take_in(uint32_t layer, const TensorView& k, const TensorView& v);
  void finish_taking_in(uint32_t layer);
  /// Appends such tokens, which have been checked. Where it throws, they are not there.
  void append_prompt(uint32_t layer, const TensorView& k, const TensorView& v, const TensorView* q,
                     const TokenSample& sample = {});
  /// Appends the token of a step, which has been checked.
  void append(uint32_t layer, const TensorView& k, const TensorView& v) {
    sequence_->append(layer, k, v);
    extended_->note_change(layer);
  }
  /// Drops the layer's tokens >= n; there are more.
  void truncate_layer(uint32_t layer, uint32_t n);
  /// Each layer to its own number of tokens. Throws Error(invalid_argument) before anything has changed where a sliding
  /// layer no longer holds its window before its token to[layer].
  void truncate(std::span<const uint32_t> to);

 private:
  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  IndexKeeper* keeper_;
  SessionAudits* audits_;
  const HostMemory* memory_;
  StreamStepper* stream_;
  ExtendedTokens* extended_;
};

}  // namespace keyhole::runtime
