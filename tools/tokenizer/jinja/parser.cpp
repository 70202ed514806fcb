#include <array>
#include <cstdlib>
#include <stdexcept>

#include "tools/tokenizer/jinja/lexer.h"
#include "tools/tokenizer/jinja/syntax.h"

namespace keyhole::tools::jinja {
namespace {

using Kind = Expression::Kind;
constexpr int kMaxDepth = 100;

std::unique_ptr<Expression> make(Kind kind, int line, std::string text = "") {
  auto expression = std::make_unique<Expression>();
  expression->kind = kind;
  expression->line = line;
  expression->text = std::move(text);
  return expression;
}

template <class... Parts>
ExpressionPtr join(Kind kind, int line, std::string text, Parts... parts) {
  auto expression = make(kind, line, std::move(text));
  (expression->parts.push_back(std::move(parts)), ...);
  return expression;
}

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokens_of(source)) {}

  Block run() {
    Block block = parse_block();
    if (now().kind != Token::Kind::end) fail("\"" + peek_block() + "\" without its beginning");
    return block;
  }

 private:
  struct Deeper {
    explicit Deeper(Parser& parser) : parser_(parser) {
      if (++parser.depth_ > kMaxDepth)
        parser.fail("nested more than " + std::to_string(kMaxDepth) + " deep");
    }
    ~Deeper() { --parser_.depth_; }
    Parser& parser_;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead(size_t n) const { return tokens_[std::min(at_ + n, tokens_.size() - 1)]; }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("line " + std::to_string(now().line) + ": " + what);
  }
  bool is_sign(std::string_view sign) const {
    return now().kind == Token::Kind::sign && now().text == sign;
  }
  bool is_word(std::string_view word) const {
    return now().kind == Token::Kind::name && now().text == word;
  }
  bool take_sign(std::string_view sign) {
    if (!is_sign(sign)) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (!is_word(word)) return false;
    ++at_;
    return true;
  }
  void expect_sign(std::string_view sign) {
    if (!take_sign(sign))
      fail("\"" + now().text + "\" where \"" + std::string(sign) + "\" is needed");
  }
  std::string expect_name() {
    if (now().kind != Token::Kind::name) fail("\"" + now().text + "\" where a name is needed");
    return tokens_[at_++].text;
  }
  void end_block() {
    if (now().kind != Token::Kind::block_end)
      fail("\"" + now().text + "\" where the tag should end");
    ++at_;
  }
  std::string peek_block() const {
    return now().kind == Token::Kind::block_begin ? ahead(1).text : "";
  }
  /// {% word %}
  void expect_end(std::string_view word) {
    if (peek_block() != word) fail(std::string(word) + " is missing");
    at_ += 2;
    end_block();
  }

  /// Statements up to a block that ends or continues something.
  Block parse_block() {
    const Deeper deeper(*this);
    Block block;
    while (now().kind != Token::Kind::end) {
      if (now().kind == Token::Kind::block_begin) {
        const std::string word = ahead(1).text;
        if (word.starts_with("end") || word == "else" || word == "elif") break;
      }
      block.push_back(parse_statement());
    }
    return block;
  }

  std::unique_ptr<const Statement> parse_statement() {
    auto statement = std::make_unique<Statement>();
    statement->line = now().line;
    if (now().kind == Token::Kind::text) {
      statement->text = tokens_[at_++].text;
      return statement;
    }
    if (now().kind == Token::Kind::output_begin) {
      ++at_;
      statement->kind = Statement::Kind::output;
      statement->expression = parse_expression();
      if (now().kind != Token::Kind::output_end)
        fail("\"" + now().text + "\" where the tag should end");
      ++at_;
      return statement;
    }
    ++at_;
    const std::string word = expect_name();
    if (word == "if") {
      parse_choice(*statement);
    } else if (word == "for") {
      parse_loop(*statement);
    } else if (word == "set") {
      parse_set(*statement);
    } else if (word == "macro") {
      parse_macro(*statement);
    } else if (word == "break" || word == "continue") {
      statement->kind = word == "break" ? Statement::Kind::stop : Statement::Kind::next;
      end_block();
    } else if (word == "generation") {
      statement->kind = Statement::Kind::group;
      end_block();
      statement->body = parse_block();
      expect_end("endgeneration");
    } else {
      fail("{% " + word +
           " %} is not built in; allowed: if, for, set, macro, break, continue, generation, raw");
    }
    return statement;
  }

  void parse_choice(Statement& statement) {
    const Deeper deeper(*this);
    statement.kind = Statement::Kind::choice;
    statement.expression = parse_expression();
    end_block();
    statement.body = parse_block();
    if (peek_block() == "elif") {
      auto inner = std::make_unique<Statement>();
      inner->line = now().line;
      at_ += 2;
      parse_choice(*inner);
      statement.other.push_back(std::move(inner));
      return;
    }
    if (peek_block() == "else") {
      at_ += 2;
      end_block();
      statement.other = parse_block();
    }
    expect_end("endif");
  }

  void parse_loop(Statement& statement) {
    statement.kind = Statement::Kind::loop;
    const bool enclosed = take_sign("(");
    do statement.names.push_back(expect_name());
    while (take_sign(","));
    if (enclosed) expect_sign(")");
    if (!take_word("in")) fail("\"" + now().text + "\" where \"in\" is needed");
    statement.expression = parse_either();
    if (take_word("if")) statement.condition = parse_expression();
    if (is_word("recursive")) fail("recursive loops are not built in");
    end_block();
    statement.body = parse_block();
    if (peek_block() == "else") {
      at_ += 2;
      end_block();
      statement.other = parse_block();
    }
    expect_end("endfor");
  }

  void parse_set(Statement& statement) {
    statement.kind = Statement::Kind::set;
    statement.names.push_back(expect_name());
    if (take_sign(".")) statement.names.push_back(expect_name());
    if (is_sign(",")) fail("set of several names is not built in");
    if (take_sign("=")) {
      statement.expression = parse_expression();
      end_block();
      return;
    }
    end_block();
    statement.body = parse_block();
    expect_end("endset");
  }

  void parse_macro(Statement& statement) {
    statement.kind = Statement::Kind::macro;
    statement.names.push_back(expect_name());
    expect_sign("(");
    while (!take_sign(")")) {
      if (statement.names.size() > 1) expect_sign(",");
      statement.names.push_back(expect_name());
      if (take_sign("=")) {
        statement.defaults.push_back(parse_expression());
      } else if (!statement.defaults.empty()) {
        fail("an argument without a default behind one with it");
      }
    }
    end_block();
    statement.body = parse_block();
    expect_end("endmacro");
  }

  // --- expressions, in the order of what binds least

  ExpressionPtr parse_expression() {
    const Deeper deeper(*this);
    ExpressionPtr value = parse_either();
    while (is_word("if")) {
      const int line = tokens_[at_++].line;
      ExpressionPtr condition = parse_either();
      ExpressionPtr other;
      if (take_word("else")) other = parse_expression();
      value = join(Kind::conditional, line, "", std::move(value), std::move(condition),
                   std::move(other));
    }
    return value;
  }

  ExpressionPtr parse_either() {
    ExpressionPtr left = parse_both();
    while (is_word("or")) {
      const int line = tokens_[at_++].line;
      left = join(Kind::either, line, "", std::move(left), parse_both());
    }
    return left;
  }

  ExpressionPtr parse_both() {
    ExpressionPtr left = parse_not();
    while (is_word("and")) {
      const int line = tokens_[at_++].line;
      left = join(Kind::both, line, "", std::move(left), parse_not());
    }
    return left;
  }

  ExpressionPtr parse_not() {
    const Deeper deeper(*this);
    if (!is_word("not")) return parse_comparison();
    const int line = tokens_[at_++].line;
    return join(Kind::negation, line, "", parse_not());
  }

  ExpressionPtr parse_comparison() {
    ExpressionPtr left = parse_sum();
    while (true) {
      const int line = now().line;
      std::string sign;
      for (const std::string_view known : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (sign.empty() && take_sign(known)) sign = known;
      }
      if (sign.empty() && take_word("in")) sign = "in";
      if (sign.empty() && is_word("not") && ahead(1).text == "in") {
        at_ += 2;
        sign = "not in";
      }
      if (sign.empty()) return left;
      left = join(Kind::binary, line, sign, std::move(left), parse_sum());
    }
  }

  ExpressionPtr parse_sum() {
    ExpressionPtr left = parse_concatenation();
    while (is_sign("+") || is_sign("-")) {
      const Token& sign = tokens_[at_++];
      left = join(Kind::binary, sign.line, sign.text, std::move(left), parse_concatenation());
    }
    return left;
  }

  ExpressionPtr parse_concatenation() {
    ExpressionPtr left = parse_product();
    while (is_sign("~")) {
      const int line = tokens_[at_++].line;
      left = join(Kind::binary, line, "~", std::move(left), parse_product());
    }
    return left;
  }

  ExpressionPtr parse_product() {
    ExpressionPtr left = parse_power();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
      const Token& sign = tokens_[at_++];
      left = join(Kind::binary, sign.line, sign.text, std::move(left), parse_power());
    }
    return left;
  }

  ExpressionPtr parse_power() {
    ExpressionPtr left = parse_signed(true);
    while (is_sign("**")) {
      const int line = tokens_[at_++].line;
      left = join(Kind::binary, line, "**", std::move(left), parse_signed(true));
    }
    return left;
  }

  ExpressionPtr parse_signed(bool filters) {
    const Deeper deeper(*this);
    ExpressionPtr value;
    if (is_sign("-") || is_sign("+")) {
      const Token& sign = tokens_[at_++];
      value = parse_signed(false);
      if (sign.text == "-") value = join(Kind::negate, sign.line, "", std::move(value));
    } else {
      value = parse_postfix(parse_primary());
    }
    return filters ? parse_filters(std::move(value)) : std::move(value);
  }

  ExpressionPtr parse_primary() {
    const Token& token = now();
    auto constant = make(Kind::constant, token.line);
    switch (token.kind) {
      case Token::Kind::string: {
        std::string text;
        while (now().kind == Token::Kind::string) text += tokens_[at_++].text;
        constant->value = Text(std::string_view(text));
        return constant;
      }
      case Token::Kind::integer:
        constant->value = static_cast<int64_t>(std::strtoll(token.text.c_str(), nullptr, 10));
        ++at_;
        return constant;
      case Token::Kind::real:
        constant->value = std::strtod(token.text.c_str(), nullptr);
        ++at_;
        return constant;
      case Token::Kind::name: {
        ++at_;
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
      default: fail("an expression is missing");
    }
    if (take_sign("(")) {
      ExpressionPtr first = parse_expression();
      if (take_sign(")")) return first;
      return parse_list(std::move(first), ")", token.line);
    }
    if (take_sign("[")) {
      if (take_sign("]")) return make(Kind::list, token.line);
      return parse_list(parse_expression(), "]", token.line);
    }
    if (take_sign("{")) {
      auto dict = make(Kind::dict, token.line);
      while (!take_sign("}")) {
        if (!dict->parts.empty()) expect_sign(",");
        if (take_sign("}")) break;
        dict->parts.push_back(parse_expression());
        expect_sign(":");
        dict->parts.push_back(parse_expression());
      }
      return dict;
    }
    fail("\"" + token.text + "\" where an expression is needed");
  }

  ExpressionPtr parse_list(ExpressionPtr first, std::string_view end, int line) {
    auto list = make(Kind::list, line);
    list->parts.push_back(std::move(first));
    while (!take_sign(end)) {
      expect_sign(",");
      if (take_sign(end)) break;
      list->parts.push_back(parse_expression());
    }
    return list;
  }

  ExpressionPtr parse_postfix(ExpressionPtr value) {
    while (true) {
      const int line = now().line;
      if (take_sign(".")) {
        const bool number = now().kind == Token::Kind::integer;
        const std::string name = number ? tokens_[at_++].text : expect_name();
        value = join(Kind::attribute, line, name, std::move(value));
      } else if (take_sign("[")) {
        value = parse_subscript(std::move(value), line);
      } else if (is_sign("(")) {
        auto call = make(Kind::call, line);
        call->parts.push_back(std::move(value));
        parse_arguments(*call);
        value = std::move(call);
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
      slice->parts.push_back(is_sign(":") || is_sign("]") ? nullptr : parse_expression());
      if (i < 2 && take_sign(":")) {
        sliced = true;
        continue;
      }
      break;
    }
    expect_sign("]");
    if (sliced) {
      slice->parts.resize(4);
      return slice;
    }
    if (slice->parts[1] == nullptr) fail("an index is missing");
    slice->kind = Kind::item;
    return slice;
  }

  /// ( a, b, name=c ) into parts and named.
  void parse_arguments(Expression& call) {
    expect_sign("(");
    bool first = true;
    while (!take_sign(")")) {
      if (!first) expect_sign(",");
      if (take_sign(")")) break;
      first = false;
      if (now().kind == Token::Kind::name && ahead(1).kind == Token::Kind::sign &&
          ahead(1).text == "=") {
        std::string name = expect_name();
        ++at_;
        call.named.emplace_back(std::move(name), parse_expression());
      } else {
        call.parts.push_back(parse_expression());
      }
    }
  }

  ExpressionPtr parse_filters(ExpressionPtr value) {
    while (true) {
      const int line = now().line;
      if (take_sign("|")) {
        auto filter = make(Kind::filter, line, expect_name());
        if (!is_filter(filter->text)) fail("the filter " + filter->text + " is not built in");
        filter->parts.push_back(std::move(value));
        if (is_sign("(")) parse_arguments(*filter);
        value = std::move(filter);
      } else if (take_word("is")) {
        const bool negated = take_word("not");
        auto test = make(Kind::test, line, expect_name());
        if (!is_test(test->text)) fail("the test " + test->text + " is not built in");
        test->parts.push_back(std::move(value));
        if (is_sign("(")) {
          parse_arguments(*test);
        } else if (test->text == "divisibleby" || test->text == "equalto" || test->text == "eq" ||
                   test->text == "sameas") {
          test->parts.push_back(parse_postfix(parse_primary()));
        }
        value = std::move(test);
        if (negated) value = join(Kind::negation, line, "", std::move(value));
      } else {
        return value;
      }
    }
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Block parse_template(std::string_view source) { return Parser(source).run(); }

}  // namespace keyhole::tools::jinja
