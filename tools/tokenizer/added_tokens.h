// added_tokens of tokenizer.json: tokens that are searched for in the text before anything else looks at it.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tools/tokenizer/bpe.h"
#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// A piece of a text: a token, or text that has not become tokens yet.
struct TextPiece {
  TextRange range;
  std::optional<uint32_t> token;
};

/// The added tokens. Immutable.
class AddedTokens {
 public:
  /// Reads `list`, which is absent where there are none. Tokens whose ids the model has no row for (`rows`) are left
  /// out: some vocabularies have tokens for images that their text models lack. Throws std::runtime_error with the
  /// place of what is wrong.
  AddedTokens(const std::optional<JsonPart>& list, const Bpe& model, const Normalizer* normalizer,
              uint32_t rows);

  /// Cuts `text` at the tokens that are searched for in the text itself or, if `normalized`, in the normalizer's
  /// result. Special ones count only where `specials` says so. No token may touch `literal`, because some models'
  /// marks of turns are not listed as special.
  [[nodiscard]] std::vector<TextPiece> cut(std::string_view text, bool normalized,
                                           Specials specials,
                                           std::span<const TextRange> literal) const;

  /// Whether there are tokens that are searched for in the normalizer's result.
  [[nodiscard]] bool has_normalized() const { return !as_normalized_.of_text.empty(); }

  [[nodiscard]] std::optional<uint32_t> id(std::string_view token) const;
  /// The text of a token; nullptr for ids that are no added token.
  [[nodiscard]] const std::string* token(uint32_t id) const;
  [[nodiscard]] bool is_special(uint32_t id) const;
  /// One more than the largest id; 0 without tokens.
  [[nodiscard]] uint32_t size() const { return size_; }

 private:
  struct Added {
    uint32_t id = 0;
    std::string text;
    bool special = false, single_word = false, strips_left = false, strips_right = false;
  };
  /// The texts to search for; of those that begin at one place the longest counts.
  struct Finder {
    std::unordered_map<std::string, size_t> of_text;
    std::array<std::vector<size_t>, 256> lengths;  // by first byte, longest first

    void add(std::string text, size_t which);
    /// The token at `at`, or nothing.
    [[nodiscard]] std::optional<size_t> find(std::string_view text, size_t at, size_t& bytes) const;
  };

  std::vector<Added> added_;
  Finder as_written_, as_normalized_;
  std::unordered_map<std::string_view, size_t> of_text_;
  std::unordered_map<uint32_t, size_t> of_id_;
  uint32_t size_ = 0;
};

}  // namespace keyhole::tools
