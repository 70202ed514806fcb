// Regular expressions of tokenizer.json. Only regex.cpp knows PCRE2.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// An expression in the syntax of Oniguruma, which Hugging Face uses, as far as PCRE2 means the same by it or it can
/// be rewritten. Immutable: any number of threads may search with it.
class Regex {
 public:
  /// Compiles. Throws std::runtime_error that begins with `place` for a malformed expression, or one that means
  /// something else to PCRE2.
  Regex(std::string_view pattern, const std::string& place);

  /// Calls `found(begin, end)` with the byte range of each match in `text`, valid UTF-8, left to right; matches may
  /// be empty. Throws std::runtime_error where the search takes too many steps.
  void each_match(std::string_view text, const std::function<void(size_t, size_t)>& found) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace keyhole::tools
