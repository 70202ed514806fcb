#include "tools/tokenizer/jinja/texts.h"

#include <string>
#include <utility>

#include "tools/tokenizer/jinja/fail.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools::jinja {
namespace {

/// The text with function(character) in place of each character. What comes of said characters is marked as said.
template <class Function>
Text each_character(const Text& text, const Function& function) {
  Text out;
  for (size_t at = 0; at < text.bytes.size();) {
    const bool is_said = text.said[at] != '\0';
    out += Text(std::string_view(function(next_character(text.bytes, at))), is_said);
  }
  return out;
}

std::string character_text(uint32_t character) {
  std::string out;
  append_character(character, out);
  return out;
}

/// Where the last character of valid UTF-8 begins.
size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U) --at;
  return at;
}

/// The ends of the text that remains when characters with is_gone(character) are taken from both sides.
template <class Gone>
std::pair<size_t, size_t> inner_part(std::string_view text, bool left, bool right,
                                     const Gone& is_gone) {
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!is_gone(next_character(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    const size_t last = last_character(text.substr(0, end));
    size_t next = last;
    if (!is_gone(next_character(text, next))) break;
    end = last;
  }
  return {begin, end};
}

}  // namespace

const Text& text_of(const Value& value, std::string_view who) {
  if (value.text() == nullptr)
    fail(std::string(who) + " of " + value.kind() + "; allowed: of a string");
  return *value.text();
}

bool is_space_of_python(uint32_t character) {
  return is_space(character) || (character >= 0x1C && character <= 0x1F);
}

size_t leading_space(std::string_view text) {
  return inner_part(text, true, false, is_space_of_python).first;
}

size_t before_trailing_space(std::string_view text) {
  return inner_part(text, false, true, is_space_of_python).second;
}

Text stripped(const Text& text, const Value& set, bool left, bool right) {
  const bool is_white = set.undefined() || set.none();
  const std::string characters = is_white ? "" : text_of(set, "strip").bytes;
  const auto [begin, end] = inner_part(text.bytes, left, right, [&](uint32_t c) {
    return is_white ? is_space_of_python(c)
                    : characters.find(character_text(c)) != std::string::npos;
  });
  return text.part(begin, end);
}

Text upper(const Text& text) {
  return each_character(text, [](uint32_t c) { return upper_case(character_text(c)); });
}
Text lower(const Text& text) {
  return each_character(text, [](uint32_t c) { return lower_case(character_text(c)); });
}

Text title(const Text& text, bool all_words) {
  bool begins = true;
  return each_character(text, [&](uint32_t c) {
    const std::string changed = begins ? title_case(c) : lower_case(character_text(c));
    begins = all_words && !is_cased(c);
    return changed;
  });
}

Text replaced(const Text& text, const Text& wanted, const Text& by, int64_t most) {
  if (wanted.bytes.empty()) fail("replace of an empty string");
  Text out;
  size_t at = 0;
  for (size_t found = text.bytes.find(wanted.bytes); found != std::string::npos && most != 0;
       found = text.bytes.find(wanted.bytes, at), --most) {
    out += text.part(at, found);
    out += by;
    at = found + wanted.bytes.size();
  }
  return out += text.part(at, text.bytes.size());
}

List split(const Text& text, const Value& separator, int64_t most) {
  List out;
  size_t at = 0;
  if (separator.undefined() || separator.none()) {
    const std::string_view bytes = text.bytes;
    while (true) {
      at += leading_space(bytes.substr(at));
      if (at == bytes.size()) return out;
      if (most-- == 0) {
        out.push_back(text.part(at, bytes.size()));
        return out;
      }
      size_t end = at;
      for (size_t next = at; next < bytes.size(); end = next) {
        if (is_space_of_python(next_character(bytes, next))) break;
      }
      out.push_back(text.part(at, end));
      at = end;
    }
  }
  const std::string mark = text_of(separator, "split").bytes;
  if (mark.empty()) fail("split at an empty string");
  for (size_t found = text.bytes.find(mark); found != std::string::npos && most != 0;
       found = text.bytes.find(mark, at), --most) {
    out.push_back(text.part(at, found));
    at = found + mark.size();
  }
  out.push_back(text.part(at, text.bytes.size()));
  return out;
}

Text joined(const List& list, const Text& separator) {
  Text out;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) out += separator;
    out += list[i].shown();
  }
  return out;
}

Text indented(const Text& text, int64_t columns, bool first) {
  if (columns < 0 || columns > 1000) fail("indent by " + std::to_string(columns));
  const std::string spaces(static_cast<size_t>(columns), ' ');
  Text out;
  if (first) out += std::string_view(spaces);
  for (size_t i = 0; i < text.bytes.size(); ++i) {
    out += text.part(i, i + 1);
    const bool line_begins =
        text.bytes[i] == '\n' && i + 1 < text.bytes.size() && text.bytes[i + 1] != '\n';
    if (line_begins) out += std::string_view(spaces);
  }
  return out;
}

}  // namespace keyhole::tools::jinja
