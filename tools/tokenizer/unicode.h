// Characters: UTF-8 in and out, classes of characters, normal forms. The only file that knows utf8proc is unicode.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// The character that begins at `at` of valid UTF-8, which moves behind it.
[[nodiscard]] uint32_t next_character(std::string_view text, size_t& at);
/// Bytes of the character that begins with this byte of valid UTF-8.
[[nodiscard]] inline size_t character_bytes(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80U ? 1 : byte < 0xE0U ? 2 : byte < 0xF0U ? 3 : 4;
}
void append_character(uint32_t character, std::string& text);

[[nodiscard]] bool is_utf8(std::string_view text);
/// `text` with U+FFFD for every longest piece that cannot begin a character (as Unicode recommends and Python's
/// "replace" does).
[[nodiscard]] std::string to_utf8(std::string_view text);

/// Unicode's White_Space.
[[nodiscard]] bool is_space(uint32_t character);
/// Letters that have cases: categories Lu, Ll, Lt.
[[nodiscard]] bool is_cased(uint32_t character);
/// Digits and other numbers: categories Nd, Nl, No.
[[nodiscard]] bool is_number(uint32_t character);
/// Categories P*, and what ASCII has besides letters and digits.
[[nodiscard]] bool is_punctuation(uint32_t character);
/// What Python's repr() writes as it is: neither controls, format characters, surrogates, private use, what is not assigned, nor
/// separators but the blank.
[[nodiscard]] bool is_printable(uint32_t character);
/// Categories M*.
[[nodiscard]] bool is_mark(uint32_t character);
/// What \w is: letters, marks, digits, connectors.
[[nodiscard]] bool is_word(uint32_t character);

enum class NormalForm : uint8_t { nfc, nfd, nfkc, nfkd };
/// `text` is valid UTF-8.
[[nodiscard]] std::string normalized(std::string_view text, NormalForm form);
/// Character by character, as Unicode's full mapping has it without context.
[[nodiscard]] std::string lower_case(std::string_view text);
[[nodiscard]] std::string upper_case(std::string_view text);
/// Of one character, as the first of a word has it: "Ss" of the German sharp s.
[[nodiscard]] std::string title_case(uint32_t character);

}  // namespace keyhole::tools
