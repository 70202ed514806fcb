// The alphabet of byte-level vocabularies (GPT-2's): a printable character for every byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// Replaces every byte by its character: '!' to '~' and most of Latin-1 stand for themselves, the others become
/// U+0100 and following.
[[nodiscard]] std::string bytes_to_characters(std::string_view bytes);

/// Returns the bytes that a token of such a vocabulary stands for. A token with other characters, as added ones may
/// have, is its own text.
[[nodiscard]] std::string characters_to_bytes(std::string_view token);

}  // namespace keyhole::tools
