#include "tools/tokenizer/byte_tokenizer.h"

#include <algorithm>

namespace keyhole::tools {

bool ByteTokenizer::fits(const ModelTokens& model) {
  const auto& ends = model.end_tokens;
  return model.vocab_size <= 512 && model.bos == kBos &&
         std::find(ends.begin(), ends.end(), kEos) != ends.end();
}

ByteTokenizer::ByteTokenizer(const ModelTokens& model)
    : vocab_size_(model.vocab_size), end_tokens_(model.end_tokens) {
  std::sort(end_tokens_.begin(), end_tokens_.end());
  end_tokens_.erase(std::unique(end_tokens_.begin(), end_tokens_.end()), end_tokens_.end());
}

std::vector<uint32_t> ByteTokenizer::encode(std::string_view text, Specials /*specials*/,
                                            std::span<const TextRange> /*literal*/) const {
  std::vector<uint32_t> tokens;
  tokens.reserve(text.size() + 1);
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::vector<uint32_t> ByteTokenizer::encode_prompt(std::string_view text, Specials specials) const {
  std::vector<uint32_t> tokens = encode(text, specials);
  tokens.insert(tokens.begin(), kBos);
  return tokens;
}

void ByteTokenizer::decode_next(uint32_t token, DecodeState& state, std::string& bytes) const {
  state.inside = true;
  if (token < 256) bytes.push_back(static_cast<char>(token));
}

std::optional<uint32_t> ByteTokenizer::token_id(std::string_view token) const {
  if (token == "<s>") return kBos;
  if (token == "</s>") return kEos;
  if (token.size() == 1) return static_cast<unsigned char>(token.front());
  return std::nullopt;
}

std::string ByteTokenizer::token_text(uint32_t token) const {
  if (token == kBos) return "<s>";
  if (token == kEos) return "</s>";
  return token < 256 ? std::string(1, static_cast<char>(token)) : "";
}

}  // namespace keyhole::tools
