// The alphabet of byte-level vocabularies (GPT-2's): a printable character for every byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// Every byte as its character: '!' to '~' and most of Latin-1 stand for themselves, the others are U+0100 on.
[[nodiscard]] std::string bytes_to_characters(std::string_view bytes);

/// The bytes that a token of such a vocabulary stands for; a token with other characters is its own text, as added
/// ones are.
[[nodiscard]] std::string characters_to_bytes(std::string_view token);

}  // namespace keyhole::tools
