// The pieces of a template: text between tags, and the words of tags.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools::jinja {

struct Token {
  enum class Kind : uint8_t {
    text,
    block_begin,
    block_end,
    output_begin,
    output_end,
    name,
    string,
    integer,
    real,
    sign,
    end
  };
  Kind kind = Kind::end;
  std::string text;  ///< a string without its quotes, escapes resolved
  int line = 0;
};

/// Cuts a template into tokens. Throws std::runtime_error with the line.
[[nodiscard]] std::vector<Token> tokens_of(std::string_view source);

}  // namespace keyhole::tools::jinja
