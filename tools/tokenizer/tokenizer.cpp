#include "tools/tokenizer/tokenizer.h"

#include <algorithm>
#include <stdexcept>

#include "tools/tokenizer/byte_tokenizer.h"
#include "tools/tokenizer/tokenizer_json.h"

namespace keyhole::tools {

std::string Tokenizer::decode(std::span<const uint32_t> tokens) const {
  std::string bytes;
  DecodeState state;
  for (const uint32_t token : tokens) decode_next(token, state, bytes);
  return bytes;
}

std::vector<uint32_t> Tokenizer::encode_inside(std::string_view text, Specials specials) const {
  if (text.empty()) return {};
  // Behind a text that stands apart from what follows, the following tokens are those inside a text.
  for (const std::string before : {"\n", ".", "|", "a"}) {
    const std::vector<uint32_t> alone = encode(before, specials);
    std::vector<uint32_t> both = encode(before + std::string(text), specials);
    if (both.size() <= alone.size() || !std::equal(alone.begin(), alone.end(), both.begin()))
      continue;
    both.erase(both.begin(), both.begin() + static_cast<ptrdiff_t>(alone.size()));
    return both;
  }
  return encode(text, specials);
}

bool Tokenizer::ends(uint32_t token) const {
  return std::binary_search(end_tokens().begin(), end_tokens().end(), token);
}

size_t complete_utf8(std::string_view bytes) {
  // The last byte that is no continuation begins the last character.
  for (size_t back = 1; back <= std::min<size_t>(3, bytes.size()); ++back) {
    const auto byte = static_cast<unsigned char>(bytes[bytes.size() - back]);
    if ((byte & 0xC0U) == 0x80U) continue;
    const size_t needed = byte >= 0xF5U   ? 1
                          : byte >= 0xF0U ? 4
                          : byte >= 0xE0U ? 3
                          : byte >= 0xC2U ? 2
                                          : 1;
    return needed > back ? bytes.size() - back : bytes.size();
  }
  return bytes.size();
}

std::string StreamDecoder::push(uint32_t token) {
  tokenizer_->decode_next(token, state_, held_);
  const size_t complete = complete_utf8(held_);
  std::string text = held_.substr(0, complete);
  held_.erase(0, complete);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  text.swap(held_);
  return text;
}

std::unique_ptr<const Tokenizer> find_tokenizer(const std::filesystem::path& folder,
                                                const ModelTokens& model) {
  std::error_code ignored;
  if (std::filesystem::exists(folder / "tokenizer.json", ignored)) {
    return load_tokenizer_json(folder, model);
  }
  if (ByteTokenizer::fits(model)) return std::make_unique<ByteTokenizer>(model);
  return nullptr;
}

std::unique_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& folder,
                                                const ModelTokens& model) {
  auto tokenizer = find_tokenizer(folder, model);
  if (tokenizer) return tokenizer;
  throw std::runtime_error(folder.string() + " has no tokenizer.json, and its vocabulary of " +
                           std::to_string(model.vocab_size) +
                           " tokens is not one of bytes (at most 512, BOS 256, EOS 257): put the "
                           "model's tokenizer.json there, or pass token ids with --tokens FILE");
}

}  // namespace keyhole::tools
