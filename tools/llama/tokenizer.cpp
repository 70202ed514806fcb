#include "tools/llama/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace keyhole::tools {

bool ByteTokenizer::fits(const LlamaConfig& config) {
  const auto& eos = config.eos_tokens;
  return config.vocab_size <= 512 && config.bos_token == kBos &&
         std::find(eos.begin(), eos.end(), kEos) != eos.end();
}

ByteTokenizer::ByteTokenizer(const LlamaConfig& config) {
  if (fits(config)) return;
  throw std::runtime_error(
      "only byte-level text is built in (at most 512 rows, BOS 256, EOS 257), and this model's "
      "vocabulary has " +
      std::to_string(config.vocab_size) +
      " rows; tokenize outside and pass the token ids with --tokens FILE");
}

std::vector<uint32_t> ByteTokenizer::encode_prompt(std::string_view text) const {
  std::vector<uint32_t> tokens = encode(text);
  tokens.insert(tokens.begin(), kBos);
  return tokens;
}

std::vector<uint32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<uint32_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string ByteTokenizer::decode(const std::vector<uint32_t>& tokens) const {
  std::string text;
  for (const uint32_t token : tokens) {
    if (token < 256) text.push_back(static_cast<char>(token));
  }
  return text;
}

std::vector<uint32_t> read_token_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  constexpr std::string_view kSeparators = " \t\r\n,";
  std::vector<uint32_t> tokens;
  for (size_t at = text.find_first_not_of(kSeparators); at != std::string::npos;
       at = text.find_first_not_of(kSeparators, at)) {
    const size_t end = std::min(text.find_first_of(kSeparators, at), text.size());
    uint32_t token = 0;
    const auto [rest, error] = std::from_chars(text.data() + at, text.data() + end, token);
    if (error != std::errc() || rest != text.data() + end) {
      throw std::runtime_error(path.string() + ": token " + std::to_string(tokens.size()) +
                               " is \"" + text.substr(at, std::min<size_t>(end - at, 20)) +
                               "\"; allowed: token ids in decimal, separated by spaces or commas");
    }
    tokens.push_back(token);
    at = end;
  }
  return tokens;
}

}  // namespace keyhole::tools
