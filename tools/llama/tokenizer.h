// Text and tokens. Only byte-level vocabularies are built in; others come as token ids in a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// token = value of the byte, 256 = BOS, 257 = EOS.
class ByteTokenizer {
 public:
  static constexpr uint32_t kBos = 256;
  static constexpr uint32_t kEos = 257;

  /// True for a vocabulary of bytes: BOS 256, EOS 257 and at most 512 rows.
  [[nodiscard]] static bool fits(const LlamaConfig& config);
  /// Throws std::runtime_error for another vocabulary: says what is built in and what to do.
  explicit ByteTokenizer(const LlamaConfig& config);

  /// BOS, then a token per byte.
  [[nodiscard]] std::vector<uint32_t> encode_prompt(std::string_view text) const;
  /// A token per byte.
  [[nodiscard]] std::vector<uint32_t> encode(std::string_view text) const;
  /// The bytes; other tokens give nothing.
  [[nodiscard]] std::string decode(const std::vector<uint32_t>& tokens) const;
};

/// Token ids in decimal, separated by white space or commas. Throws std::runtime_error that names the
/// file and the place of what is not a token id.
[[nodiscard]] std::vector<uint32_t> read_token_file(const std::filesystem::path& path);

}  // namespace keyhole::tools
