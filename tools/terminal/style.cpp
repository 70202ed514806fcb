#include "tools/terminal/style.h"

#include <unistd.h>

#include <cstdlib>

namespace keyhole::tools {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = environment(name);
    if (value.empty()) continue;  // the first one that is set decides
    return value.find("UTF-8") != std::string_view::npos ||
           value.find("utf8") != std::string_view::npos;
  }
  return false;
}

const char* sequence(Tint tint) {
  switch (tint) {
    case Tint::bold: return "\033[1m";
    case Tint::dim: return "\033[2m";
    case Tint::red: return "\033[31m";
    case Tint::green: return "\033[32m";
    case Tint::yellow: return "\033[33m";
    case Tint::none: break;
  }
  return "";
}

}  // namespace

Style style_of(std::FILE* stream) {
  if (isatty(fileno(stream)) == 0) return {};
  return {environment("NO_COLOR").empty() && environment("TERM") != "dumb", locale_is_utf8()};
}

std::string tinted(std::string_view text, Tint tint, const Style& style) {
  if (!style.colour || tint == Tint::none) return std::string(text);
  return sequence(tint) + std::string(text) + "\033[0m";
}

size_t display_width(std::string_view text) {
  size_t width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {  // skip to the letter that ends the sequence
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xc0U) != 0x80U) {
      ++width;  // continuation bytes of UTF-8 add nothing
    }
  }
  return width;
}

}  // namespace keyhole::tools
