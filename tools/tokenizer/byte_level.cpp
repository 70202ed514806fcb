#include "tools/tokenizer/byte_level.h"

#include <array>

#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

struct Alphabet {
  std::array<std::string, 256> of_byte;
  std::array<int, 512> byte_of{};  // by character; -1: none

  Alphabet() {
    byte_of.fill(-1);
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool itself =
          (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const uint32_t character = itself ? byte : next++;
      append_character(character, of_byte[byte]);
      byte_of[character] = static_cast<int>(byte);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet instance;
  return instance;
}

}  // namespace

std::string bytes_to_characters(std::string_view bytes) {
  const auto& of_byte = alphabet().of_byte;
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 4);
  for (const char c : bytes) out += of_byte[static_cast<unsigned char>(c)];
  return out;
}

std::string characters_to_bytes(std::string_view token) {
  const auto& byte_of = alphabet().byte_of;
  std::string out;
  for (size_t at = 0; at < token.size();) {
    const uint32_t character = next_character(token, at);
    if (character >= byte_of.size() || byte_of[character] < 0) return std::string(token);
    out.push_back(static_cast<char>(byte_of[character]));
  }
  return out;
}

}  // namespace keyhole::tools
