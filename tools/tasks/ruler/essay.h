// Prose as a haystack: so many words of it, cut into sentences.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools::ruler {

class Essay {
 public:
  /// Reads the words of `text`, which lives longer. Throws UsageError where there is none.
  explicit Essay(std::string_view text);

  /// The first `count` words with a blank between them; where the text has fewer, it begins anew.
  [[nodiscard]] std::string words(size_t count) const;

 private:
  std::vector<std::string_view> words_;
};

/// Cuts a text behind every `.`, `?` or `!` (with quotation marks or brackets that close behind it) that a blank
/// follows; the blank is dropped. RULER takes the sentence tokenizer of NLTK, which knows abbreviations.
[[nodiscard]] std::vector<std::string> sentences(std::string_view text);

}  // namespace keyhole::tools::ruler
