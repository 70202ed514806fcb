// The vocabulary of bytes.
#pragma once

#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// A token is the value of a byte, 256 = BOS ("<s>") or 257 = EOS ("</s>").
class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr uint32_t kBos = 256;
  static constexpr uint32_t kEos = 257;

  /// True for a vocabulary of bytes: BOS 256, EOS 257 and at most 512 rows.
  [[nodiscard]] static bool fits(const ModelTokens& model);
  /// `model` must be one that fits().
  explicit ByteTokenizer(const ModelTokens& model);

  /// One token per byte, whatever `specials` says, because no text means BOS or EOS.
  [[nodiscard]] std::vector<uint32_t> encode(
      std::string_view text, Specials specials = Specials::as_text,
      std::span<const TextRange> literal = {}) const override;
  /// BOS, then one token per byte.
  [[nodiscard]] std::vector<uint32_t> encode_prompt(
      std::string_view text, Specials specials = Specials::as_text) const override;
  void decode_next(uint32_t token, DecodeState& state, std::string& bytes) const override;
  [[nodiscard]] std::optional<uint32_t> token_id(std::string_view token) const override;
  [[nodiscard]] std::string token_text(uint32_t token) const override;
  [[nodiscard]] bool is_special(uint32_t token) const override { return token >= kBos; }
  [[nodiscard]] uint32_t vocab_size() const override { return vocab_size_; }
  [[nodiscard]] const std::vector<uint32_t>& end_tokens() const override { return end_tokens_; }

 private:
  uint32_t vocab_size_;
  std::vector<uint32_t> end_tokens_;
};

}  // namespace keyhole::tools
