#include "tools/tokenizer/jinja/expressions.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace keyhole::tools::jinja {

const Token& Words::ahead(size_t n) const { return tokens_[std::min(at_ + n, tokens_.size() - 1)]; }

void Words::fail(const std::string& what) const {
  throw std::runtime_error("line " + std::to_string(now().line) + ": " + what);
}

bool Words::is_sign(std::string_view sign) const {
  return now().kind == Token::Kind::sign && now().text == sign;
}

bool Words::is_word(std::string_view word) const {
  return now().kind == Token::Kind::name && now().text == word;
}

bool Words::take_sign(std::string_view sign) {
  if (!is_sign(sign)) return false;
  ++at_;
  return true;
}

bool Words::take_word(std::string_view word) {
  if (!is_word(word)) return false;
  ++at_;
  return true;
}

void Words::expect_sign(std::string_view sign) {
  if (!take_sign(sign))
    fail("\"" + now().text + "\" where \"" + std::string(sign) + "\" is needed");
}

std::string Words::expect_name() {
  if (now().kind != Token::Kind::name) fail("\"" + now().text + "\" where a name is needed");
  return tokens_[at_++].text;
}

Words::Deeper::Deeper(Words& words) : words_(words) {
  constexpr int kMaxDepth = 100;
  if (++words_.depth_ > kMaxDepth) {
    --words_.depth_;
    words_.fail("nested more than " + std::to_string(kMaxDepth) + " deep");
  }
}

namespace {

using Kind = Expression::Kind;

std::unique_ptr<Expression> make(Kind kind, int line, std::string text = "") {
  auto expression = std::make_unique<Expression>();
  expression->kind = kind;
  expression->line = line;
  expression->text = std::move(text);
  return expression;
}

/// Notes the depth of the expression, and checks that code which walks the tree can bear it: a long chain of
/// operators is a deep tree.
ExpressionPtr finished(std::unique_ptr<Expression> expression) {
  constexpr int kMaxTree = 500;
  const auto count = [&](const ExpressionPtr& part) {
    if (part) expression->depth = std::max(expression->depth, part->depth + 1);
  };
  for (const ExpressionPtr& part : expression->parts) count(part);
  for (const auto& argument : expression->named) count(argument.second);
  if (expression->depth > kMaxTree) {
    throw std::runtime_error("line " + std::to_string(expression->line) +
                             ": an expression of more than " + std::to_string(kMaxTree) +
                             " operations in a row");
  }
  return expression;
}

template <class... Parts>
ExpressionPtr join(Kind kind, int line, std::string text, Parts... parts) {
  auto expression = make(kind, line, std::move(text));
  (expression->parts.push_back(std::move(parts)), ...);
  return finished(std::move(expression));
}

class ExpressionParser {
 public:
  explicit ExpressionParser(Words& words) : words_(words) {}

  // Operators are parsed in the order of how loosely they bind, the loosest first.
  ExpressionPtr parse_expression() {
    const Words::Deeper deeper(words_);
    ExpressionPtr value = parse_either();
    while (words_.is_word("if")) {
      const int line = words_.take().line;
      ExpressionPtr condition = parse_either();
      ExpressionPtr other;
      if (words_.take_word("else")) other = parse_expression();
      value = join(Kind::conditional, line, "", std::move(value), std::move(condition),
                   std::move(other));
    }
    return value;
  }

  ExpressionPtr parse_either() {
    ExpressionPtr left = parse_both();
    while (words_.is_word("or")) {
      const int line = words_.take().line;
      left = join(Kind::either, line, "", std::move(left), parse_both());
    }
    return left;
  }

 private:
  ExpressionPtr parse_both() {
    ExpressionPtr left = parse_not();
    while (words_.is_word("and")) {
      const int line = words_.take().line;
      left = join(Kind::both, line, "", std::move(left), parse_not());
    }
    return left;
  }

  ExpressionPtr parse_not() {
    const Words::Deeper deeper(words_);
    if (!words_.is_word("not")) return parse_comparison();
    const int line = words_.take().line;
    return join(Kind::negation, line, "", parse_not());
  }

  ExpressionPtr parse_comparison() {
    ExpressionPtr left = parse_sum();
    while (true) {
      const int line = words_.now().line;
      std::string sign;
      for (const std::string_view known : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (sign.empty() && words_.take_sign(known)) sign = known;
      }
      if (sign.empty() && words_.take_word("in")) sign = "in";
      if (sign.empty() && words_.is_word("not") && words_.ahead(1).text == "in") {
        words_.skip(2);
        sign = "not in";
      }
      if (sign.empty()) return left;
      left = join(Kind::binary, line, sign, std::move(left), parse_sum());
    }
  }

  ExpressionPtr parse_sum() {
    ExpressionPtr left = parse_concatenation();
    while (words_.is_sign("+") || words_.is_sign("-")) {
      const Token& sign = words_.take();
      left = join(Kind::binary, sign.line, sign.text, std::move(left), parse_concatenation());
    }
    return left;
  }

  ExpressionPtr parse_concatenation() {
    ExpressionPtr left = parse_product();
    while (words_.is_sign("~")) {
      const int line = words_.take().line;
      left = join(Kind::binary, line, "~", std::move(left), parse_product());
    }
    return left;
  }

  ExpressionPtr parse_product() {
    ExpressionPtr left = parse_power();
    while (words_.is_sign("*") || words_.is_sign("/") || words_.is_sign("//") ||
           words_.is_sign("%")) {
      const Token& sign = words_.take();
      left = join(Kind::binary, sign.line, sign.text, std::move(left), parse_power());
    }
    return left;
  }

  ExpressionPtr parse_power() {
    ExpressionPtr left = parse_signed(true);
    while (words_.is_sign("**")) {
      const int line = words_.take().line;
      left = join(Kind::binary, line, "**", std::move(left), parse_signed(true));
    }
    return left;
  }

  ExpressionPtr parse_signed(bool filters) {
    const Words::Deeper deeper(words_);
    ExpressionPtr value;
    if (words_.is_sign("-") || words_.is_sign("+")) {
      const Token& sign = words_.take();
      value = parse_signed(false);
      if (sign.text == "-") value = join(Kind::negate, sign.line, "", std::move(value));
    } else {
      value = parse_postfix(parse_primary());
    }
    return filters ? parse_filters(std::move(value)) : std::move(value);
  }

  ExpressionPtr parse_primary() {
    const Token& token = words_.now();
    auto constant = make(Kind::constant, token.line);
    switch (token.kind) {
      case Token::Kind::string: {
        std::string text;
        while (words_.now().kind == Token::Kind::string) text += words_.take().text;
        constant->value = Text(std::string_view(text));
        return constant;
      }
      case Token::Kind::integer:
        constant->value = static_cast<int64_t>(std::strtoll(token.text.c_str(), nullptr, 10));
        words_.skip(1);
        return constant;
      case Token::Kind::real:
        constant->value = std::strtod(token.text.c_str(), nullptr);
        words_.skip(1);
        return constant;
      case Token::Kind::name: {
        words_.skip(1);
        const std::string& word = token.text;
        if (word == "true" || word == "True") {
          constant->value = true;
        } else if (word == "false" || word == "False") {
          constant->value = false;
        } else if (word == "none" || word == "None") {
          constant->value = None{};
        } else {
          return make(Kind::name, token.line, word);
        }
        return constant;
      }
      case Token::Kind::sign: break;
      default: words_.fail("an expression is missing");
    }
    if (words_.take_sign("(")) {
      ExpressionPtr first = parse_expression();
      if (words_.take_sign(")")) return first;
      return parse_list(std::move(first), ")", token.line);
    }
    if (words_.take_sign("[")) {
      if (words_.take_sign("]")) return make(Kind::list, token.line);
      return parse_list(parse_expression(), "]", token.line);
    }
    if (words_.take_sign("{")) {
      auto dict = make(Kind::dict, token.line);
      while (!words_.take_sign("}")) {
        if (!dict->parts.empty()) words_.expect_sign(",");
        if (words_.take_sign("}")) break;
        dict->parts.push_back(parse_expression());
        words_.expect_sign(":");
        dict->parts.push_back(parse_expression());
      }
      return finished(std::move(dict));
    }
    words_.fail("\"" + token.text + "\" where an expression is needed");
  }

  ExpressionPtr parse_list(ExpressionPtr first, std::string_view end, int line) {
    auto list = make(Kind::list, line);
    list->parts.push_back(std::move(first));
    while (!words_.take_sign(end)) {
      words_.expect_sign(",");
      if (words_.take_sign(end)) break;
      list->parts.push_back(parse_expression());
    }
    return finished(std::move(list));
  }

  ExpressionPtr parse_postfix(ExpressionPtr value) {
    while (true) {
      const int line = words_.now().line;
      if (words_.take_sign(".")) {
        const bool number = words_.now().kind == Token::Kind::integer;
        const std::string name = number ? words_.take().text : words_.expect_name();
        value = join(Kind::attribute, line, name, std::move(value));
      } else if (words_.take_sign("[")) {
        value = parse_subscript(std::move(value), line);
      } else if (words_.is_sign("(")) {
        auto call = make(Kind::call, line);
        call->parts.push_back(std::move(value));
        parse_arguments(*call);
        value = finished(std::move(call));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr value, int line) {
    auto slice = make(Kind::slice, line);
    slice->parts.push_back(std::move(value));
    bool sliced = false;
    for (int i = 0; i < 3; ++i) {
      slice->parts.push_back(words_.is_sign(":") || words_.is_sign("]") ? nullptr
                                                                        : parse_expression());
      if (i < 2 && words_.take_sign(":")) {
        sliced = true;
        continue;
      }
      break;
    }
    words_.expect_sign("]");
    if (sliced) {
      slice->parts.resize(4);
      return finished(std::move(slice));
    }
    if (slice->parts[1] == nullptr) words_.fail("an index is missing");
    slice->kind = Kind::item;
    return finished(std::move(slice));
  }

  /// ( a, b, name=c ) into parts and named.
  void parse_arguments(Expression& call) {
    words_.expect_sign("(");
    bool first = true;
    while (!words_.take_sign(")")) {
      if (!first) words_.expect_sign(",");
      if (words_.take_sign(")")) break;
      first = false;
      if (words_.now().kind == Token::Kind::name && words_.ahead(1).kind == Token::Kind::sign &&
          words_.ahead(1).text == "=") {
        std::string name = words_.expect_name();
        words_.skip(1);
        call.named.emplace_back(std::move(name), parse_expression());
      } else {
        call.parts.push_back(parse_expression());
      }
    }
  }

  ExpressionPtr parse_filters(ExpressionPtr value) {
    while (true) {
      const int line = words_.now().line;
      if (words_.take_sign("|")) {
        auto filter = make(Kind::filter, line, words_.expect_name());
        if (!is_filter(filter->text))
          words_.fail("the filter " + filter->text + " is not built in");
        filter->parts.push_back(std::move(value));
        if (words_.is_sign("(")) parse_arguments(*filter);
        value = finished(std::move(filter));
      } else if (words_.take_word("is")) {
        const bool negated = words_.take_word("not");
        auto test = make(Kind::test, line, words_.expect_name());
        if (!is_test(test->text)) words_.fail("the test " + test->text + " is not built in");
        test->parts.push_back(std::move(value));
        if (words_.is_sign("(")) {
          parse_arguments(*test);
        } else if (test->text == "divisibleby" || test->text == "equalto" || test->text == "eq" ||
                   test->text == "sameas") {
          test->parts.push_back(parse_postfix(parse_primary()));
        }
        value = finished(std::move(test));
        if (negated) value = join(Kind::negation, line, "", std::move(value));
      } else {
        return value;
      }
    }
  }

  Words& words_;
};

}  // namespace

ExpressionPtr parse_expression(Words& words) { return ExpressionParser(words).parse_expression(); }
ExpressionPtr parse_either(Words& words) { return ExpressionParser(words).parse_either(); }

}  // namespace keyhole::tools::jinja
