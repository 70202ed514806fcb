#include "tools/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdexcept>

#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

constexpr size_t kMaxPattern = 65536;
// What Oniguruma means by \s and \w; PCRE2 counts U+180E among the spaces and leaves marks out of words.
constexpr std::string_view kSpaces = R"(\t-\r\x{85}\p{Z})";
constexpr std::string_view kWords = R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc})";
constexpr std::string_view kHexDigits = "0-9A-Fa-f";

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  return pcre2_get_error_message(error, text, sizeof(text)) < 0 ? "unknown error"
                                                                : reinterpret_cast<char*>(text);
}

/// The expression as PCRE2 has to read it.
std::string translated(std::string_view pattern, const std::string& place) {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error(place + " is " + shown_text(pattern) + ": " + what);
  };
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char kind = pattern[++i];
      const bool negated = kind == 'S' || kind == 'W' || kind == 'H';
      const std::string_view set = kind == 's' || kind == 'S'   ? kSpaces
                                   : kind == 'w' || kind == 'W' ? kWords
                                   : kind == 'h' || kind == 'H' ? kHexDigits
                                                                : "";
      if (set.empty() || (negated && in_class)) {
        out.append({c, kind});
      } else if (in_class) {
        out += set;
      } else {
        out.append(negated ? "[^" : "[").append(set).append("]");
      }
      continue;
    }
    if (in_class) {
      if (c == '[' && (i + 1 == pattern.size() || pattern[i + 1] != ':')) {
        refuse("a class inside a class; allowed: classes without others");
      }
      if (c == '[') {  // [:alpha:]
        const size_t end = pattern.find(":]", i);
        if (end == std::string_view::npos) refuse("a class without an end");
        out.append(pattern, i, end + 2 - i);
        i = end + 1;
        continue;
      }
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') {
        refuse("an intersection of classes; allowed: classes without &&");
      }
      if (c == ']' && i > class_begin) in_class = false;
    } else if (c == '[') {
      in_class = true;
      class_begin = i + 1;
      if (class_begin < pattern.size() && pattern[class_begin] == '^') ++class_begin;
    }
    out.push_back(c);
  }
  return out;
}

template <class T, void (*Free)(T*)>
struct Freed {
  void operator()(T* object) const { Free(object); }
};
using CompileContext = std::unique_ptr<pcre2_compile_context,
                                       Freed<pcre2_compile_context, pcre2_compile_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Freed<pcre2_match_data, pcre2_match_data_free>>;
using MatchContext =
    std::unique_ptr<pcre2_match_context, Freed<pcre2_match_context, pcre2_match_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Freed<pcre2_jit_stack, pcre2_jit_stack_free>>;

}  // namespace

struct Regex::Code {
  std::unique_ptr<pcre2_code, Freed<pcre2_code, pcre2_code_free>> compiled;
  std::string place;
};

Regex::Regex(std::string_view pattern, const std::string& place) {
  if (pattern.size() > kMaxPattern) {
    throw std::runtime_error(place + " has " + std::to_string(pattern.size()) +
                             " bytes; allowed: at most " + std::to_string(kMaxPattern));
  }
  const std::string source = translated(pattern, place);
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE where = 0;
  // Multi-line, as ^ and $ are the borders of lines in Oniguruma.
  auto code = std::make_shared<Code>();
  code->compiled.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                    &where, context.get()));
  if (!code->compiled) {
    throw std::runtime_error(place + " is " + shown_text(pattern) + ": " + message_of(error) +
                             " (PCRE2, at byte " + std::to_string(where) + ")");
  }
  code->place = place;
  // Where there is no just-in-time compiler, matching interprets: slower, the same result.
  (void)pcre2_jit_compile(code->compiled.get(), PCRE2_JIT_COMPLETE);
  code_ = std::move(code);
}

void Regex::each_match(std::string_view text,
                       const std::function<void(size_t, size_t)>& found) const {
  const pcre2_code* code = code_->compiled.get();
  const MatchData data(pcre2_match_data_create_from_pattern(code, nullptr));
  if (!data) throw std::bad_alloc();
  MatchContext context;
  JitStack stack;
  for (size_t at = 0; at <= text.size();) {
    int count = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                            PCRE2_NO_UTF_CHECK, data.get(), context.get());
    if (count == PCRE2_ERROR_JIT_STACKLIMIT && !stack) {
      context.reset(pcre2_match_context_create(nullptr));
      stack.reset(pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr));
      if (!context || !stack) throw std::bad_alloc();
      pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
      continue;
    }
    if (count == PCRE2_ERROR_NOMATCH) return;
    if (count < 0) throw std::runtime_error(code_->place + ": " + message_of(count));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    // With \K a match could begin behind its end.
    if (range[0] < at || range[1] < range[0]) {
      throw std::runtime_error(code_->place + ": a match begins behind its end");
    }
    found(range[0], range[1]);
    at = range[1];
    // Behind an empty match the search goes on one character further.
    if (range[1] == range[0]) {
      if (at >= text.size()) return;
      at += character_bytes(text[at]);
    }
  }
}

}  // namespace keyhole::tools
