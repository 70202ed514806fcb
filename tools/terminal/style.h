// Whether and how a stream may be decorated.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace keyhole::tools {

enum class Tint { none, bold, dim, red, green, yellow };

/// What a stream can show.
struct Style {
  bool colour = false;   ///< escape sequences for colour
  bool unicode = false;  ///< line-drawing characters
};

/// Colour on a terminal, unless NO_COLOR (https://no-color.org) is set to anything or TERM is
/// "dumb". Unicode on a terminal whose locale (LC_ALL, LC_CTYPE, LANG) is UTF-8. Pipes and files
/// get neither.
[[nodiscard]] Style style_of(std::FILE* stream);

/// `text` in a colour, or unchanged where the style has none.
[[nodiscard]] std::string tinted(std::string_view text, Tint tint, const Style& style);

/// Columns that `text` takes on a terminal: escape sequences none, a UTF-8 character one.
[[nodiscard]] size_t display_width(std::string_view text);

}  // namespace keyhole::tools
