// One answer of a model, token by token: sampled, decoded to text, and ended by a Stops.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/generation/sampler.h"
#include "tools/generation/sequence.h"
#include "tools/generation/stop_text.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// The conditions that end an answer.
struct Stops {
  uint32_t most_tokens = 64;
  std::vector<uint32_t> end_tokens;  ///< of the model; empty: none
  std::vector<std::string> texts;    ///< wants a tokenizer
};

enum class StopReason : uint8_t {
  none,    ///< it goes on, or was given up
  length,  ///< most_tokens
  end_token,
  text,
};
/// The reason as text: "length", "end-token", "text", "none".
[[nodiscard]] const char* to_text(StopReason reason);

/// Generates an answer. Borrows the sequence, the sampler and the tokenizer. The sequence has logits, and stays one
/// token behind the answer: whatever goes on from there takes the last token.
class Generator {
 public:
  /// `tokenizer` null: tokens without text. `follows`: the text continues one before it (DecodeState::in_text()),
  /// rather than being one of its own.
  Generator(Sequence& sequence, Sampler& sampler, const Tokenizer* tokenizer, Stops stops,
            DecodeState follows = {});

  struct Piece {
    uint32_t token = 0;
    /// Text that can be shown now: whole UTF-8 characters, no end token, nothing of a stop text. With the last token
    /// it is all that is left, without a character that the end cut off.
    std::string text;
  };
  /// Takes the former token and samples the next; returns nothing after the token that ended the answer. Throws what
  /// the decoder and the sampler throw.
  [[nodiscard]] std::optional<Piece> next();
  /// Ends the answer early. Returns the text that was held back, without a half character.
  [[nodiscard]] std::string give_up();

  [[nodiscard]] StopReason reason() const { return reason_; }
  /// All tokens so far, including the end token.
  [[nodiscard]] const std::vector<uint32_t>& tokens() const { return tokens_; }
  /// The texts of all pieces together.
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  [[nodiscard]] bool is_end(uint32_t token) const;

  Sequence& sequence_;
  Sampler& sampler_;
  Stops stops_;
  StopText stop_text_;
  std::optional<StreamDecoder> decoder_;
  std::vector<uint32_t> tokens_;
  std::string text_;
  StopReason reason_ = StopReason::none;
  bool ended_ = false;
};

}  // namespace keyhole::tools
