#include "tools/commands/common/prompt_text.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

#include "tools/terminal/errors.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string read_text_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string printable(const std::string& bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    const std::string_view character =
        std::string_view(bytes).substr(at, character_bytes(bytes[at]));
    size_t behind = 0;
    const bool is_one = is_utf8(character);
    const uint32_t c = is_one ? next_character(character, behind) : 0;
    // Neither controls of ASCII nor those above it, which move a terminal's cursor.
    if (is_one && (c == '\n' || c == '\t' || (c >= 0x20 && c < 0x7F) || c >= 0xA0)) {
      text += character;
      at += character.size();
      continue;
    }
    char code[5];
    std::snprintf(code, sizeof(code), "\\x%02x", static_cast<unsigned char>(bytes[at++]));
    text += code;
  }
  return text;
}

void check_not_empty(const std::vector<uint32_t>& tokens, const std::string& name) {
  if (!tokens.empty()) return;
  throw UsageError("the prompt " + name +
                   " is empty, and this model has no token that begins a text (BOS); needed: a "
                   "text of at least one token");
}

std::string read_prompt_file(const fs::path& path) {
  std::error_code ignored;
  const std::string named = "--prompt " + path.string();
  if (path == "-") {
    throw UsageError("--prompt -: needed: a file; standard input is --prompt /dev/stdin");
  }
  if (fs::is_directory(path, ignored)) {
    throw UsageError(named + " is a folder; needed: a text file");
  }
  if (!fs::exists(path, ignored)) {
    throw std::runtime_error(
        named +
        ": there is no such file; needed: the name of a text file. A text itself "
        "comes by standard input: echo TEXT | keyhole ... --prompt /dev/stdin");
  }
  return read_text_file(path);
}

}  // namespace keyhole::tools
