#include "tools/tasks/ruler/score.h"

#include <algorithm>
#include <array>

#include "tools/tasks/ruler/list_score.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kDigitsOfScore = "0123456789";

std::string_view stripped(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\v\f\r\x1c\x1d\x1e\x1f";
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) + 1 - begin);
}

std::string_view first_number(std::string_view text) {
  const size_t begin = std::min(text.find_first_of(kDigitsOfScore), text.size());
  const size_t end = std::min(text.find_first_not_of(kDigitsOfScore, begin), text.size());
  return text.substr(begin, end - begin);
}

/// Whether `word` is one of the words of a text, or the first of them.
bool has_word(std::string_view text, std::string_view word, bool first) {
  constexpr std::string_view kBetween = " \t\n\v\f\r:\"'.,?!{}";
  for (size_t at = text.find_first_not_of(kBetween); at != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    if (text.substr(at, end - at) == word) return true;
    if (first) return false;
    at = text.find_first_not_of(kBetween, end);
  }
  return false;
}

}  // namespace

std::string_view name_of(Scoring scoring) {
  static constexpr std::array kNames{"all",        "part",    "first_number", "word",
                                     "first_word", "records", "ordered"};
  return kNames.at(static_cast<size_t>(scoring));
}

std::string cleaned(std::string_view prediction) {
  std::string text(stripped(prediction));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '\n');
  return std::string(stripped(text));
}

double score(Scoring scoring, std::string_view prediction,
             const std::vector<std::string>& references) {
  if (scoring == Scoring::first_number) {
    return first_number(prediction) == references.front() ? 1.0 : 0.0;
  }
  if (scoring == Scoring::word || scoring == Scoring::first_word) {
    const bool first = scoring == Scoring::first_word;
    return has_word(prediction, references.front(), first) ? 1.0 : 0.0;
  }
  if (scoring == Scoring::records) return score_records(prediction, references);
  if (scoring == Scoring::ordered) return score_ordered(prediction, references);
  const std::string text = lower_case(to_utf8(prediction));
  const auto contained =
      std::count_if(references.begin(), references.end(), [&](const std::string& reference) {
        return text.find(lower_case(to_utf8(reference))) != std::string::npos;
      });
  if (scoring == Scoring::part) return contained > 0 ? 1.0 : 0.0;
  return static_cast<double>(contained) / static_cast<double>(references.size());
}

}  // namespace keyhole::tools::ruler
