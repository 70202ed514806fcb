#include "tools/commands/common/attend_choice.h"

#include <algorithm>
#include <cstdio>

#include "runtime/files/settings.h"
#include "tools/commands/common/parse_number.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr const Setting& kAttend = setting(kBudgetSettings, "attend");

[[noreturn]] void refuse_attend(const std::string& text) {
  throw UsageError(
      "--attend " + text +
      ": allowed: topk, topk:K with K from 1 on, scored, none, weight:EPS with EPS above 0 "
      "and below 1");
}

}  // namespace

std::string AttendChoice::text() const {
  std::string text = word_of_number(kAttend, mode);
  if (mode == KEYHOLE_ATTEND_TOPK) text += ":" + std::to_string(k);
  if (mode == KEYHOLE_ATTEND_WEIGHT) {
    char digits[32];
    std::snprintf(digits, sizeof digits, ":%g", min_weight);
    text += digits;
  }
  return text;
}

AttendChoice parse_attend(const std::string& text, uint32_t k) {
  AttendChoice choice;
  choice.k = k;
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const bool has_value = colon != std::string::npos;
  const std::string value = has_value ? text.substr(colon + 1) : "";
  const auto mode = number_of_word(kAttend, name);
  if (!mode) refuse_attend(text);
  choice.mode = *mode;
  if (choice.mode == KEYHOLE_ATTEND_WEIGHT) {
    if (!parse_number(value, choice.min_weight) ||
        !(choice.min_weight > 0 && choice.min_weight < 1)) {
      refuse_attend(text);
    }
  } else if (choice.mode == KEYHOLE_ATTEND_TOPK && has_value) {
    choice.has_own_k = true;
    if (!parse_number(value, choice.k) || choice.k == 0) refuse_attend(text);
  } else if (has_value) {
    refuse_attend(text);
  }
  return choice;
}

std::vector<AttendChoice> parse_attends(const std::vector<std::string>& texts, uint32_t k) {
  std::vector<AttendChoice> choices;
  if (texts.empty()) return {parse_attend("topk", k)};
  for (const std::string& text : texts) {
    const AttendChoice choice = parse_attend(text, k);
    const bool known = std::any_of(choices.begin(), choices.end(), [&](const AttendChoice& c) {
      return c.text() == choice.text();
    });
    if (known) throw UsageError("--attend " + text + " is given twice");
    choices.push_back(choice);
  }
  return choices;
}

}  // namespace keyhole::tools
