#include "tools/tokenizer/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <stdexcept>

#include "tools/tokenizer/jinja/texts.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools::jinja {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_octal(char c) { return c >= '0' && c <= '7'; }

/// Line ends as Jinja reads templates: CR LF and CR are line ends like LF, also within strings.
std::string with_unix_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    out.push_back(source[i] == '\r' ? '\n' : source[i]);
  }
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source)
      : whole_(with_unix_lines(source)),
        // One line end at the very end is the editor's.
        source_(
            std::string_view(whole_).substr(0, whole_.size() - (whole_.ends_with('\n') ? 1 : 0))) {
    if (!is_utf8(source)) throw std::runtime_error("it is not UTF-8");
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = next_tag();
      put_text(tag);
      if (tag == std::string_view::npos) break;
      read_tag(tag);
    }
    tokens_.push_back({Token::Kind::end, "", line_});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("line " + std::to_string(line_) + ": " + what);
  }

  size_t next_tag() const {
    for (size_t i = source_.find('{', at_); i != std::string_view::npos;
         i = source_.find('{', i + 1)) {
      if (i + 1 < source_.size() &&
          (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#')) {
        return i;
      }
    }
    return std::string_view::npos;
  }

  char mark_at(size_t tag) const { return tag + 2 < source_.size() ? source_[tag + 2] : '\0'; }

  /// The text up to `tag`, without the white space that the tags on both sides take.
  void put_text(size_t tag) {
    const size_t end = tag == std::string_view::npos ? source_.size() : tag;
    std::string_view text = source_.substr(at_, end - at_);
    for (const char c : text) line_ += c == '\n' ? 1 : 0;
    const size_t begin = takes_all_                                  ? leading_space(text)
                         : takes_line_end_ && text.starts_with('\n') ? 1
                                                                     : 0;
    text.remove_prefix(begin);
    if (tag != std::string_view::npos) {
      const char mark = mark_at(tag);
      if (mark == '-') {
        text = text.substr(0, before_trailing_space(text));
      } else if (mark != '+' && source_[tag + 1] != '{') {
        // White space between the line's beginning and a block.
        const size_t line = text.rfind('\n') + 1;  // 0 where there is no line end
        const bool begins = line > 0 || at_ == 0 || begin > 0;
        if (begins && leading_space(text.substr(line)) == text.size() - line) {
          text = text.substr(0, line);
        }
      }
    }
    if (!text.empty()) tokens_.push_back({Token::Kind::text, std::string(text), line_});
    at_ = end;
    takes_all_ = takes_line_end_ = false;
  }

  void read_tag(size_t tag) {
    const char kind = source_[tag + 1];
    at_ = tag + 2;
    if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) ++at_;
    if (kind == '#') {
      const size_t end = source_.find("#}", at_);
      if (end == std::string_view::npos) fail("a comment without an end");
      for (size_t i = at_; i < end; ++i) line_ += source_[i] == '\n' ? 1 : 0;
      takes_all_ = end > at_ && source_[end - 1] == '-';
      takes_line_end_ = !takes_all_ && source_[end - 1] != '+';
      at_ = end + 2;
      return;
    }
    const bool output = kind == '{';
    tokens_.push_back({output ? Token::Kind::output_begin : Token::Kind::block_begin, "", line_});
    const std::string_view close = output ? "}}" : "%}";
    int braces = 0;
    while (true) {
      const size_t blank = leading_space(source_.substr(at_));
      for (const size_t end = at_ + blank; at_ < end; ++at_) line_ += source_[at_] == '\n' ? 1 : 0;
      if (at_ >= source_.size()) fail("a tag without an end");
      const std::string_view rest = source_.substr(at_);
      const bool marked = rest[0] == '-' || rest[0] == '+';
      if (braces == 0 &&
          (rest.starts_with(close) || (marked && rest.substr(1).starts_with(close)))) {
        takes_all_ = rest[0] == '-';
        takes_line_end_ = !output && !marked;
        at_ += 2 + (marked ? 1 : 0);
        break;
      }
      if (rest[0] == '{') ++braces;
      if (rest[0] == '}') --braces;
      read_word();
    }
    tokens_.push_back({output ? Token::Kind::output_end : Token::Kind::block_end, "", line_});
    if (!output) read_raw();
  }

  /// {% raw %}: everything up to {% endraw %} is text.
  void read_raw() {
    const size_t n = tokens_.size();
    if (n < 3 || tokens_[n - 2].text != "raw" || tokens_[n - 3].kind != Token::Kind::block_begin)
      return;
    tokens_.resize(n - 3);
    for (size_t i = source_.find("{%", at_); i != std::string_view::npos;
         i = source_.find("{%", i + 2)) {
      size_t word = i + 2;
      if (word < source_.size() && (source_[word] == '-' || source_[word] == '+')) ++word;
      word += leading_space(source_.substr(std::min(word, source_.size())));
      if (!source_.substr(std::min(word, source_.size())).starts_with("endraw")) continue;
      const size_t end = source_.find("%}", word);
      if (end == std::string_view::npos) break;
      takes_line_end_ = false;  // what raw begins with is text, unless a minus takes it
      put_text(i);
      at_ = end + 2;
      takes_all_ = source_[end - 1] == '-';
      takes_line_end_ = source_[end - 1] != '-' && source_[end - 1] != '+';
      return;
    }
    fail("raw without endraw");
  }

  void read_word() {
    const char c = source_[at_];
    if (c == '"' || c == '\'') return read_string(c);
    const size_t begin = at_;
    if (is_digit(c)) {
      while (at_ < source_.size() && is_digit(source_[at_])) ++at_;
      const bool real =
          at_ + 1 < source_.size() && source_[at_] == '.' && is_digit(source_[at_ + 1]);
      if (real) {
        ++at_;
        while (at_ < source_.size() && is_digit(source_[at_])) ++at_;
      }
      if (at_ - begin > 18) fail("a number of more than 18 digits");
      tokens_.push_back({real ? Token::Kind::real : Token::Kind::integer,
                         std::string(source_.substr(begin, at_ - begin)), line_});
      return;
    }
    if (is_name(c)) {
      while (at_ < source_.size() && is_name(source_[at_])) ++at_;
      tokens_.push_back(
          {Token::Kind::name, std::string(source_.substr(begin, at_ - begin)), line_});
      return;
    }
    static constexpr std::array<std::string_view, 22> kSigns{
        "==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%",
        "~",  "<",  ">",  "(",  ")",  "[",  "]", "{", "}", ",", ":"};
    for (const std::string_view sign : kSigns) {
      if (source_.substr(at_).starts_with(sign)) return put_sign(sign);
    }
    for (const std::string_view sign : {"|", ".", "="}) {
      if (source_.substr(at_).starts_with(sign)) return put_sign(sign);
    }
    fail(std::string("\"") + c + "\" in a tag");
  }

  void put_sign(std::string_view sign) {
    tokens_.push_back({Token::Kind::sign, std::string(sign), line_});
    at_ += sign.size();
  }

  void read_string(char quote) {
    std::string text;
    for (++at_; at_ < source_.size() && source_[at_] != quote; ++at_) {
      char c = source_[at_];
      if (c == '\n') ++line_;
      if (c != '\\' || at_ + 1 >= source_.size()) {
        text.push_back(c);
        continue;
      }
      c = source_[++at_];
      switch (c) {
        case 'n': text.push_back('\n'); break;
        case 't': text.push_back('\t'); break;
        case 'r': text.push_back('\r'); break;
        case 'a': text.push_back('\a'); break;
        case 'b': text.push_back('\b'); break;
        case 'f': text.push_back('\f'); break;
        case 'v': text.push_back('\v'); break;
        case 'x': append_character(hex(2), text); break;
        case 'u': append_character(hex(4), text); break;
        case 'U': append_character(hex(8), text); break;
        case '\n': break;
        case '\\':
        case '\'':
        case '"': text.push_back(c); break;
        default:
          if (is_octal(c)) {
            append_character(octal(), text);
          } else {
            text.append({'\\', c});
          }
          break;
      }
    }
    if (at_ >= source_.size()) fail("a string without an end");
    ++at_;
    tokens_.push_back({Token::Kind::string, std::move(text), line_});
  }

  /// The character of up to three octal digits; stands on the last of them then.
  uint32_t octal() {
    uint32_t value = static_cast<uint32_t>(source_[at_] - '0');
    for (int more = 0; more < 2 && at_ + 1 < source_.size() && is_octal(source_[at_ + 1]); ++more) {
      value = value * 8 + static_cast<uint32_t>(source_[++at_] - '0');
    }
    return value;
  }

  /// The character of the next `digits` hexadecimal digits; stands on the last of them then.
  uint32_t hex(size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      ++at_;
      if (at_ >= source_.size() || std::isxdigit(static_cast<unsigned char>(source_[at_])) == 0)
        fail("an escape that is not hexadecimal");
      const char c = source_[at_];
      value = value * 16 + static_cast<uint32_t>(is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    if (value > 0x10FFFF) fail("an escape beyond the last character, U+10FFFF");
    return value >= 0xD800 && value < 0xE000 ? 0xFFFD : value;
  }

  std::string whole_;
  std::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
  bool takes_all_ = false;       // the tag before ended with -
  bool takes_line_end_ = false;  // it was a block
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) { return Lexer(source).run(); }

}  // namespace keyhole::tools::jinja
