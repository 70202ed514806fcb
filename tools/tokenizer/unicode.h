// Characters: UTF-8 in and out, classes of characters, normal forms. Only unicode.cpp knows utf8proc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// Returns the character that begins at `at` of valid UTF-8, and moves `at` behind it.
[[nodiscard]] uint32_t next_character(std::string_view text, size_t& at);
/// Number of bytes of the character that begins with this byte of valid UTF-8.
[[nodiscard]] inline size_t character_bytes(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80U ? 1 : byte < 0xE0U ? 2 : byte < 0xF0U ? 3 : 4;
}
void append_character(uint32_t character, std::string& text);

[[nodiscard]] bool is_utf8(std::string_view text);
/// Makes valid UTF-8 of `text`, with U+FFFD for every longest piece that cannot begin a character (as Unicode
/// recommends and Python's "replace" does).
[[nodiscard]] std::string to_utf8(std::string_view text);

/// Whether a character has Unicode's property White_Space.
[[nodiscard]] bool is_space(uint32_t character);
/// Whether a character is a letter that has cases: categories Lu, Ll, Lt.
[[nodiscard]] bool is_cased(uint32_t character);
/// Whether a character is a digit or other number: categories Nd, Nl, No.
[[nodiscard]] bool is_number(uint32_t character);
/// Whether a character is of a category P*, or in ASCII neither letter, digit, space nor control.
[[nodiscard]] bool is_punctuation(uint32_t character);
/// Whether Python's repr() writes a character as it is: not controls, format characters, surrogates, private use,
/// unassigned ones, nor separators except the blank.
[[nodiscard]] bool is_printable(uint32_t character);
/// Whether a character is a mark: categories M*.
[[nodiscard]] bool is_mark(uint32_t character);
/// Whether \w matches a character: letters, marks, digits, connectors.
[[nodiscard]] bool is_word(uint32_t character);

enum class NormalForm : uint8_t { nfc, nfd, nfkc, nfkd };
/// The normal form of `text`, which is valid UTF-8.
[[nodiscard]] std::string normalized(std::string_view text, NormalForm form);
/// The text in lower case, character by character, by Unicode's full mapping without context.
[[nodiscard]] std::string lower_case(std::string_view text);
[[nodiscard]] std::string upper_case(std::string_view text);
/// The title case of one character, as at the beginning of a word: "Ss" for the German sharp s.
[[nodiscard]] std::string title_case(uint32_t character);

}  // namespace keyhole::tools
