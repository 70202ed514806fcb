// Decorations of a stream: whether it may have any, and which.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace keyhole::tools {

enum class Tint { none, bold, dim, red, green, yellow };

/// The decorations that a stream can show.
struct Style {
  bool colour = false;   ///< escape sequences for colour
  bool unicode = false;  ///< line-drawing characters
};

/// The style of a stream. Colour on a terminal, unless NO_COLOR (https://no-color.org) is set to anything or TERM is
/// "dumb". Unicode on a terminal whose locale (LC_ALL, LC_CTYPE, LANG) is UTF-8. Pipes and files get neither.
[[nodiscard]] Style style_of(std::FILE* stream);

/// `text` in a colour, or unchanged where the style has none.
[[nodiscard]] std::string tinted(std::string_view text, Tint tint, const Style& style);

/// Number of columns that `text` takes on a terminal: escape sequences take none, a UTF-8 character one.
[[nodiscard]] size_t display_width(std::string_view text);

}  // namespace keyhole::tools
