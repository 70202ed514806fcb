#include "tools/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <stdexcept>

namespace keyhole::tools {
namespace {

unsigned char byte_at(std::string_view text, size_t at) {
  return static_cast<unsigned char>(text[at]);
}

/// Bytes of the valid character at `at`; 0 where none begins there, with the bytes that are one error in `wrong`.
size_t valid_bytes(std::string_view text, size_t at, size_t& wrong) {
  const unsigned char first = byte_at(text, at);
  wrong = 1;
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const size_t needed = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte says whether the character is overlong, a surrogate or beyond U+10FFFF.
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < needed; ++i) {
    wrong = i;
    if (at + i >= text.size()) return 0;
    const unsigned char byte = byte_at(text, at + i);
    if (byte < (i == 1 ? low : 0x80) || byte > (i == 1 ? high : 0xBF)) return 0;
  }
  return needed;
}

utf8proc_category_t category_of(uint32_t character) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(character));
}

/// Characters whose upper case is several, of scripts that are written so today; Greek letters with an iota below keep
/// the one character that Unicode's simple mapping has.
struct LongUpper {
  uint32_t character;
  const char* upper;
};
constexpr std::array<LongUpper, 11> kLongUpper{{{0xDF, "SS"},
                                                {0x149, "\xCA\xBCN"},
                                                {0x1F0, "J\xCC\x8C"},
                                                {0x587, "\xD4\xB5\xD5\x92"},
                                                {0xFB00, "FF"},
                                                {0xFB01, "FI"},
                                                {0xFB02, "FL"},
                                                {0xFB03, "FFI"},
                                                {0xFB04, "FFL"},
                                                {0xFB05, "ST"},
                                                {0xFB06, "ST"}}};

/// Null: its upper case is one character.
const LongUpper* long_upper(uint32_t character) {
  const auto* const found =
      std::find_if(kLongUpper.begin(), kLongUpper.end(),
                   [&](const LongUpper& entry) { return entry.character == character; });
  return found == kLongUpper.end() ? nullptr : found;
}

}  // namespace

uint32_t next_character(std::string_view text, size_t& at) {
  const size_t bytes = character_bytes(text[at]);
  const unsigned char first = byte_at(text, at);
  uint32_t character = bytes == 1 ? first : first & (0x7FU >> bytes);
  for (size_t i = 1; i < bytes; ++i) character = character << 6 | (byte_at(text, at + i) & 0x3FU);
  at += bytes;
  return character;
}

void append_character(uint32_t character, std::string& text) {
  const auto put = [&text](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (character < 0x80) return put(character);
  if (character < 0x800) {
    put(0xC0 | character >> 6);
  } else {
    if (character < 0x10000) {
      put(0xE0 | character >> 12);
    } else {
      put(0xF0 | character >> 18);
      put(0x80 | (character >> 12 & 0x3F));
    }
    put(0x80 | (character >> 6 & 0x3F));
  }
  put(0x80 | (character & 0x3F));
}

bool is_utf8(std::string_view text) {
  size_t wrong = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = valid_bytes(text, at, wrong);
    if (bytes == 0) return false;
    at += bytes;
  }
  return true;
}

std::string to_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t wrong = 0;
    const size_t bytes = valid_bytes(text, at, wrong);
    if (bytes == 0) {
      out += "\xEF\xBF\xBD";
      at += wrong;
    } else {
      out.append(text, at, bytes);
      at += bytes;
    }
  }
  return out;
}

bool is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_cased(uint32_t c) {
  const auto category = category_of(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LT;
}

bool is_number(uint32_t c) {
  const auto category = category_of(c);
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(uint32_t c) {
  if (c < 0x80) return c > 0x20 && c < 0x7F && std::isalnum(static_cast<int>(c)) == 0;
  const auto category = category_of(c);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_printable(uint32_t c) {
  const auto category = category_of(c);
  return c == ' ' || (category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS);
}

bool is_mark(uint32_t c) {
  const auto category = category_of(c);
  return category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
}

bool is_word(uint32_t c) {
  const auto category = category_of(c);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) ||
         category == UTF8PROC_CATEGORY_PC || c == 0x200C || c == 0x200D;
}

std::string normalized(std::string_view text, NormalForm form) {
  const bool ascii = std::all_of(text.begin(), text.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (ascii) return std::string(text);
  const bool composed = form == NormalForm::nfc || form == NormalForm::nfkc;
  const bool compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const auto options = static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (compatible ? UTF8PROC_COMPAT : 0));
  utf8proc_uint8_t* out = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &out, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(out, &std::free);
  if (size < 0) throw std::runtime_error(std::string("normal form: ") + utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(out), static_cast<size_t>(size)};
}

std::string lower_case(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const uint32_t c = next_character(text, at);
    if (c == 0x130) {
      out += "i\xCC\x87";  // the one character whose lower case is two
    } else {
      append_character(static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))),
                       out);
    }
  }
  return out;
}

std::string upper_case(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const uint32_t c = next_character(text, at);
    if (const LongUpper* several = long_upper(c)) {
      out += several->upper;
    } else {
      append_character(static_cast<uint32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))),
                       out);
    }
  }
  return out;
}

std::string title_case(uint32_t c) {
  std::string out;
  if (const LongUpper* several = long_upper(c)) {
    const std::string upper = several->upper;
    const size_t first = character_bytes(upper.front());
    return upper.substr(0, first) + lower_case(std::string_view(upper).substr(first));
  }
  append_character(static_cast<uint32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))), out);
  return out;
}

}  // namespace keyhole::tools
