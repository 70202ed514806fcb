// English words by kind, written for this project: what RULER takes from the package wonderwords.
#pragma once

#include <string>
#include <vector>

namespace keyhole::tools::ruler {

/// The lists of words/nouns.txt, adjectives.txt and verbs.txt, each ascending and without repetition.
[[nodiscard]] const std::vector<std::string>& nouns();
[[nodiscard]] const std::vector<std::string>& adjectives();
[[nodiscard]] const std::vector<std::string>& verbs();

/// The words of the three lists together, ascending and without repetition.
[[nodiscard]] const std::vector<std::string>& all_words();

}  // namespace keyhole::tools::ruler
