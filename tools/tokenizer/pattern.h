// The patterns of tokenizer.json: a text or a regular expression, and how a text is cut at its matches.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/regex.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// A pattern, {"String": "..."} or {"Regex": "..."}.
class Pattern {
 public:
  explicit Pattern(const JsonPart& part);
  explicit Pattern(Regex regex) : what_(std::move(regex)) {}

  /// The ranges of all matches in `text`, ascending and without overlap.
  [[nodiscard]] std::vector<TextRange> matches(std::string_view text) const;
  /// The text that is matched, or nullptr for an expression.
  [[nodiscard]] const std::string* literal() const { return std::get_if<std::string>(&what_); }

 private:
  std::variant<std::string, Regex> what_;
};

/// The treatment of matches, as in Hugging Face's SplitDelimiterBehavior.
enum class SplitBehavior : uint8_t {
  removed,
  isolated,
  merged_with_previous,
  merged_with_next,
  contiguous,
};
/// Reads a behavior: "Removed", "Isolated", ...
[[nodiscard]] SplitBehavior split_behavior(const JsonPart& part);

/// The pieces of a text of `bytes` bytes between and at `matches`, none of them empty; `invert` takes what lies
/// between matches for the matches.
[[nodiscard]] std::vector<TextRange> split_at(size_t bytes, const std::vector<TextRange>& matches,
                                              SplitBehavior behavior, bool invert);

}  // namespace keyhole::tools
