// How predictions are scored.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools::ruler {

enum class Scoring : uint8_t {
  all,           ///< the share of references that the prediction contains, in any case of letters
  part,          ///< 1 where it contains any reference, in any case of letters
  first_number,  ///< 1 where its first run of digits is the reference
  word,  ///< 1 where the reference is one of its words, which punctuation other than dashes parts
  first_word,  ///< 1 where the first of these words is the reference
  records,     ///< F1 of its records, see score_records()
  ordered,     ///< the share of its things that stand in order, see score_ordered()
};

/// Its name above.
[[nodiscard]] std::string_view name_of(Scoring scoring);

/// A prediction as it is scored: without white space around it, control characters as line ends.
[[nodiscard]] std::string cleaned(std::string_view prediction);

/// The score of a cleaned prediction, 0..1. There is at least one reference. Any bytes are allowed: what is not UTF-8
/// becomes U+FFFD.
[[nodiscard]] double score(Scoring scoring, std::string_view prediction,
                           const std::vector<std::string>& references);

}  // namespace keyhole::tools::ruler
