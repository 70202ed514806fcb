// Chat templates as trees: the part of Jinja 2 in which they are written, with the settings of Hugging Face (blocks
// take the white space around them).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/tokenizer/jinja/value.h"

namespace keyhole::tools::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct Expression {
  enum class Kind : uint8_t {
    constant,     // value
    name,         // text
    attribute,    // parts[0] . text
    item,         // parts[0] [ parts[1] ]
    slice,        // parts[0] [ parts[1] : parts[2] : parts[3] ], any of them null
    list,         // parts
    dict,         // parts: key, value, ...
    call,         // parts[0] ( parts[1] ..., named )
    filter,       // parts[0] | text ( parts[1] ..., named )
    test,         // parts[0] is text ( parts[1] ... )
    negate,       // - parts[0]
    negation,     // not parts[0]
    both,         // parts[0] and parts[1]
    either,       // parts[0] or parts[1]
    binary,       // parts[0] text parts[1]: + - * / // % ** ~ == != < <= > >= in, not in
    conditional,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind = Kind::constant;
  int line = 0;
  int depth = 1;  // of the tree from here on
  Value value;
  std::string text;
  std::vector<ExpressionPtr> parts;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Statement;
using Block = std::vector<std::unique_ptr<const Statement>>;

struct Statement {
  enum class Kind : uint8_t {
    text,    // text
    output,  // {{ expression }}
    set,  // names[0] = expression, or names[0].names[1] = expression; without expression: of what body writes
    choice,  // if expression: body, else: other
    loop,    // for names in expression if condition: body, else: other
    macro,   // names[0] ( names[1] ..., defaults ): body
    stop,    // break
    next,    // continue
    group,   // body, in the scope around it
  };
  Kind kind = Kind::text;
  int line = 0;
  std::string text;
  std::vector<std::string> names;
  ExpressionPtr expression, condition;
  std::vector<ExpressionPtr> defaults;  // of a macro's last names
  Block body, other;
};

/// Parses a template. Throws std::runtime_error with the line for a malformed one, or one that uses what is not built
/// in.
[[nodiscard]] Block parse_template(std::string_view source);

/// Whether there is a filter, or a test, of that name, for the parser: templates that use others are refused before
/// they are run.
[[nodiscard]] bool is_filter(std::string_view name);
[[nodiscard]] bool is_test(std::string_view name);

}  // namespace keyhole::tools::jinja
