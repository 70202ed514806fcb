// The words of a template, and the expressions that they form.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tokenizer/jinja/lexer.h"
#include "tools/tokenizer/jinja/syntax.h"

namespace keyhole::tools::jinja {

/// A place among the words. Functions that expect something throw std::runtime_error with the line where it is
/// missing.
class Words {
 public:
  explicit Words(std::string_view source) : tokens_(tokens_of(source)) {}

  [[nodiscard]] const Token& now() const { return tokens_[at_]; }
  [[nodiscard]] const Token& ahead(size_t n) const;
  /// Returns the word here and moves behind it.
  const Token& take() { return tokens_[at_++]; }
  void skip(size_t words) { at_ += words; }
  [[noreturn]] void fail(const std::string& what) const;

  [[nodiscard]] bool is_sign(std::string_view sign) const;
  [[nodiscard]] bool is_word(std::string_view word) const;
  bool take_sign(std::string_view sign);
  bool take_word(std::string_view word);
  void expect_sign(std::string_view sign);
  std::string expect_name();

  /// While one lives, parsing is one level deeper, at most 100 levels.
  class Deeper {
   public:
    explicit Deeper(Words& words);
    ~Deeper() { --words_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Words& words_;
  };

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

/// Parses an expression, up to the word that cannot belong to it.
[[nodiscard]] ExpressionPtr parse_expression(Words& words);
/// Parses an expression without `a if b else c`, for `for x in a if b`.
[[nodiscard]] ExpressionPtr parse_either(Words& words);

}  // namespace keyhole::tools::jinja
