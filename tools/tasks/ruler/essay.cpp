#include "tools/tasks/ruler/essay.h"

#include <algorithm>

#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {

Essay::Essay(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\v\f\r";
  for (size_t at = text.find_first_not_of(kSpaces); at != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(kSpaces, at), text.size());
    words_.push_back(text.substr(at, end - at));
    at = text.find_first_not_of(kSpaces, end);
  }
  if (words_.empty()) throw UsageError("the haystack has no word; allowed: any prose");
}

std::string Essay::words(size_t count) const {
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += ' ';
    out += words_[i % words_.size()];
  }
  return out;
}

std::vector<std::string> sentences(std::string_view text) {
  std::vector<std::string> out;
  size_t begin = 0;
  for (size_t blank = text.find(' '); blank != std::string_view::npos;
       blank = text.find(' ', blank + 1)) {
    const size_t last = text.substr(0, blank).find_last_not_of("\"')]");
    const bool ends = last != std::string_view::npos && last >= begin &&
                      std::string_view(".?!").find(text[last]) != std::string_view::npos;
    if (!ends) continue;
    out.emplace_back(text.substr(begin, blank - begin));
    begin = blank + 1;
  }
  if (begin < text.size()) out.emplace_back(text.substr(begin));
  return out;
}

}  // namespace keyhole::tools::ruler
