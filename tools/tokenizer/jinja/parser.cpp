#include "tools/tokenizer/jinja/expressions.h"

namespace keyhole::tools::jinja {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view source) : words_(source) {}

  Block run() {
    Block block = parse_block();
    if (words_.now().kind != Token::Kind::end) {
      words_.fail("\"" + peek_block() + "\" without its beginning");
    }
    return block;
  }

 private:
  void end_block() {
    if (words_.now().kind != Token::Kind::block_end) {
      words_.fail("\"" + words_.now().text + "\" where the tag should end");
    }
    words_.skip(1);
  }
  std::string peek_block() const {
    return words_.now().kind == Token::Kind::block_begin ? words_.ahead(1).text : "";
  }
  /// {% word %}
  void expect_end(std::string_view word) {
    if (peek_block() != word) words_.fail(std::string(word) + " is missing");
    words_.skip(2);
    end_block();
  }

  /// Statements up to a block that ends or continues something.
  Block parse_block() {
    const Words::Deeper deeper(words_);
    Block block;
    while (words_.now().kind != Token::Kind::end) {
      if (words_.now().kind == Token::Kind::block_begin) {
        const std::string word = words_.ahead(1).text;
        if (word.starts_with("end") || word == "else" || word == "elif") break;
      }
      block.push_back(parse_statement());
    }
    return block;
  }

  std::unique_ptr<const Statement> parse_statement() {
    auto statement = std::make_unique<Statement>();
    statement->line = words_.now().line;
    if (words_.now().kind == Token::Kind::text) {
      statement->text = words_.take().text;
      return statement;
    }
    if (words_.now().kind == Token::Kind::output_begin) {
      words_.skip(1);
      statement->kind = Statement::Kind::output;
      statement->expression = parse_expression(words_);
      if (words_.now().kind != Token::Kind::output_end)
        words_.fail("\"" + words_.now().text + "\" where the tag should end");
      words_.skip(1);
      return statement;
    }
    words_.skip(1);
    const std::string word = words_.expect_name();
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
      words_.fail(
          "{% " + word +
          " %} is not built in; allowed: if, for, set, macro, break, continue, generation, raw");
    }
    return statement;
  }

  void parse_choice(Statement& statement) {
    const Words::Deeper deeper(words_);
    statement.kind = Statement::Kind::choice;
    statement.expression = parse_expression(words_);
    end_block();
    statement.body = parse_block();
    if (peek_block() == "elif") {
      auto inner = std::make_unique<Statement>();
      inner->line = words_.now().line;
      words_.skip(2);
      parse_choice(*inner);
      statement.other.push_back(std::move(inner));
      return;
    }
    if (peek_block() == "else") {
      words_.skip(2);
      end_block();
      statement.other = parse_block();
    }
    expect_end("endif");
  }

  void parse_loop(Statement& statement) {
    statement.kind = Statement::Kind::loop;
    const bool enclosed = words_.take_sign("(");
    do statement.names.push_back(words_.expect_name());
    while (words_.take_sign(","));
    if (enclosed) words_.expect_sign(")");
    if (!words_.take_word("in"))
      words_.fail("\"" + words_.now().text + "\" where \"in\" is needed");
    statement.expression = parse_either(words_);
    if (words_.take_word("if")) statement.condition = parse_expression(words_);
    if (words_.is_word("recursive")) words_.fail("recursive loops are not built in");
    end_block();
    statement.body = parse_block();
    if (peek_block() == "else") {
      words_.skip(2);
      end_block();
      statement.other = parse_block();
    }
    expect_end("endfor");
  }

  void parse_set(Statement& statement) {
    statement.kind = Statement::Kind::set;
    statement.names.push_back(words_.expect_name());
    if (words_.take_sign(".")) statement.names.push_back(words_.expect_name());
    if (words_.is_sign(",")) words_.fail("set of several names is not built in");
    if (words_.take_sign("=")) {
      statement.expression = parse_expression(words_);
      end_block();
      return;
    }
    end_block();
    statement.body = parse_block();
    expect_end("endset");
  }

  void parse_macro(Statement& statement) {
    statement.kind = Statement::Kind::macro;
    statement.names.push_back(words_.expect_name());
    words_.expect_sign("(");
    while (!words_.take_sign(")")) {
      if (statement.names.size() > 1) words_.expect_sign(",");
      statement.names.push_back(words_.expect_name());
      if (words_.take_sign("=")) {
        statement.defaults.push_back(parse_expression(words_));
      } else if (!statement.defaults.empty()) {
        words_.fail("an argument without a default behind one with it");
      }
    }
    end_block();
    statement.body = parse_block();
    expect_end("endmacro");
  }

  Words words_;
};

}  // namespace

Block parse_template(std::string_view source) { return Parser(source).run(); }

}  // namespace keyhole::tools::jinja
