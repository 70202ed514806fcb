// A decoder and the tokens that it has taken, so that a prompt can go on from what is there already.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/llama/decoder.h"

namespace keyhole::tools {

/// The sequence. Borrows the decoder, which nothing else moves meanwhile. One thread at a time.
class Sequence {
 public:
  /// `taken`: the decoder.tokens() tokens that the decoder's cache holds already, of a loaded session.
  explicit Sequence(Decoder& decoder, std::vector<uint32_t> taken = {});

  /// The work of a bring_to().
  struct Work {
    size_t reused = 0;     ///< tokens that were there and stayed
    size_t forgotten = 0;  ///< tokens that were there and went
    size_t prefilled = 0;  ///< tokens of a prefill: all, or none. Its indexes are not built
    size_t stepped = 0;    ///< tokens taken behind those, by steps or several at once
    double seconds = 0.0;
  };
  /// Makes `tokens` (at least one) the sequence: keeps the longest common beginning, forgets the rest, and takes what
  /// is missing. Decoders prefill a whole prompt or nothing, so missing tokens are taken by steps, or as many at once
  /// as the decoder takes. A whole prefill replaces that where it is less work, where the decoder cannot go back so
  /// far, or where the longer sequence is turned otherwise (Decoder::turns_otherwise). logits() are there afterwards:
  /// the last token is taken again where nothing else is missing. Where `progress` or the decoder throws, the
  /// sequence is what has been taken.
  Work bring_to(std::span<const uint32_t> tokens, const PrefillProgress& progress = {});

  /// Takes all tokens anew where LongRoPE's frequencies change between two lengths of a growing sequence. It calls
  /// bring_to() with them, and does what its caller does behind a prefill. Without it bring_to() is called, which is
  /// enough where there is no index.
  using TakeAnew = std::function<void(std::span<const uint32_t> all)>;
  void set_take_anew(TakeAnew take_anew) { take_anew_ = std::move(take_anew); }

  /// Appends a token; returns the logits that follow it. Where the longer sequence turns otherwise, all tokens are
  /// taken anew.
  std::span<const float> step(uint32_t token) { return extend({&token, 1}); }
  /// Appends several tokens like step(), at most as many as the decoder takes at once.
  std::span<const float> extend(std::span<const uint32_t> tokens);
  /// The logits that follow the last token, `[vocab]`; empty where no token has been taken since the beginning or
  /// forget().
  [[nodiscard]] std::span<const float> logits() const { return logits_; }
  /// The tokens that the cache holds.
  [[nodiscard]] const std::vector<uint32_t>& tokens() const { return tokens_; }
  /// Forgets all tokens from `tokens` on; there are no logits() then, if any were forgotten.
  void truncate(size_t tokens);

 private:
  /// Goes back; returns false where the decoder cannot, or where nothing would be left.
  bool can_go_back_to(size_t tokens);
  void prefill(std::span<const uint32_t> tokens, const PrefillProgress& progress);

  Decoder& decoder_;
  TakeAnew take_anew_;
  std::vector<uint32_t> tokens_;
  std::span<const float> logits_;  ///< the decoder's
};

}  // namespace keyhole::tools
