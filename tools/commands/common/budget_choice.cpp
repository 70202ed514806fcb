#include "tools/commands/common/budget_choice.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "runtime/files/settings.h"
#include "tools/commands/common/parse_number.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr const Setting& kTail = setting(kBudgetSettings, "tail");
constexpr const Setting& kPartition = setting(kSessionSettings, "tail_partition");

[[noreturn]] void refuse_tail(const std::string& text) {
  throw UsageError("--tail " + text +
                   ": allowed: none, codes, or mean, centroid, second, each of these with :N where "
                   "partitions shall "
                   "have N keys, N from 4 to 1024");
}

[[noreturn]] void refuse_target(const std::string& text) {
  throw UsageError("--target " + text +
                   ": allowed: none, or error=X, mass=X or both (X above 0 and below 1), and with "
                   "them min=N, max=N (keys, N from 1 on; min at most max), separated by commas");
}

std::string number_text(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", value);
  return digits;
}

template <class Choice, class Parse>
std::vector<Choice> parse_all(const char* option, const std::vector<std::string>& texts,
                              Parse&& parse) {
  std::vector<Choice> choices;
  for (const std::string& text : texts) {
    const Choice choice = parse(text);
    if (std::find(choices.begin(), choices.end(), choice) != choices.end()) {
      throw UsageError(std::string(option) + " " + text + " is given twice");
    }
    choices.push_back(choice);
  }
  if (choices.empty()) choices.emplace_back();
  return choices;
}

}  // namespace

std::string TailChoice::text() const {
  std::string text(word_of_number(kTail, mode));
  if (mode != KEYHOLE_TAIL_NONE && keys_per_partition != KEYHOLE_AUTO) {
    text += ":" + std::to_string(keys_per_partition);
  }
  return text;
}

std::string TargetChoice::text() const {
  if (!any()) return "none";
  std::string text;
  const auto add = [&](const char* name, const std::string& value) {
    text += (text.empty() ? "" : ",") + std::string(name) + "=" + value;
  };
  if (error != 0) add("error", number_text(error));
  if (mass != 0) add("mass", number_text(mass));
  if (min_keys != 0) add("min", std::to_string(min_keys));
  if (max_keys != 0) add("max", std::to_string(max_keys));
  return text;
}

std::string BudgetChoice::text() const {
  std::string text = attend.text();
  if (tail.mode != KEYHOLE_TAIL_NONE) text += " tail=" + tail.text();
  if (target.any()) return text + " " + target.text();
  if (target.min_keys != 0) text += " min=" + std::to_string(target.min_keys);
  if (target.max_keys != 0) text += " max=" + std::to_string(target.max_keys);
  return text;
}

keyhole_search_options BudgetChoice::search_options() const {
  keyhole_search_options options;
  keyhole_search_options_init(&options);
  options.budget = budget();
  return options;
}

keyhole_budget BudgetChoice::budget() const {
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  budget.top_k = attend.k;
  budget.attend = attend.mode;
  budget.min_weight = attend.min_weight;
  budget.tail = tail.mode;
  budget.error_target = target.error;
  budget.mass_target = target.mass;
  budget.min_keys = target.min_keys;
  budget.max_keys = target.max_keys;
  return budget;
}

BudgetChoice choice_of(const keyhole_budget& budget) {
  BudgetChoice choice;
  choice.attend = {budget.attend, budget.top_k, budget.min_weight, true};
  choice.tail.mode = budget.tail;
  choice.tail.given = true;
  choice.target = {budget.error_target, budget.mass_target, budget.min_keys, budget.max_keys};
  return choice;
}

bool has_codes(const std::string& spec) {
  return spec == kAutoIndex || spec.substr(0, spec.find(':')) == "codes";
}

BudgetChoice for_index(BudgetChoice choice, const std::string& spec) {
  if (!has_codes(spec)) return choice;
  const bool topk = choice.attend.mode == KEYHOLE_ATTEND_TOPK;
  const bool can = topk || choice.attend.mode == KEYHOLE_ATTEND_NONE;
  if (!choice.tail.given && can && !choice.target.any()) choice.tail.mode = KEYHOLE_TAIL_CODES;
  if (choice.reads_codes() && topk && !choice.attend.has_own_k) {
    choice.attend.k = choice.exact_rows.value_or(16);
    if (choice.attend.k == 0) choice.attend = {.mode = KEYHOLE_ATTEND_NONE, .k = 16};
  }
  return choice;
}

TailChoice parse_tail(const std::string& text) {
  const size_t colon = text.find(':');
  const auto mode = number_of_word(kTail, std::string_view(text).substr(0, colon));
  if (!mode) refuse_tail(text);
  TailChoice choice;
  choice.mode = *mode;
  choice.given = true;
  if (colon == std::string::npos) return choice;
  if (choice.mode == KEYHOLE_TAIL_NONE || choice.mode == KEYHOLE_TAIL_CODES ||
      !parse_number(std::string_view(text).substr(colon + 1), choice.keys_per_partition) ||
      choice.keys_per_partition < kPartition.range.low ||
      choice.keys_per_partition > kPartition.range.high) {
    refuse_tail(text);
  }
  return choice;
}

TargetChoice parse_target(const std::string& text) {
  TargetChoice choice;
  if (text == "none") return choice;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) refuse_target(text);
    const std::string_view name = item.substr(0, equals);
    const std::string_view value = item.substr(equals + 1);
    const auto take_share = [&](float& share) {
      if (share != 0 || !parse_number(value, share) || !(share > 0 && share < 1)) {
        refuse_target(text);
      }
    };
    const auto take_count = [&](uint32_t& count) {
      if (count != 0 || !parse_number(value, count) || count == 0) refuse_target(text);
    };
    if (name == "error") {
      take_share(choice.error);
    } else if (name == "mass") {
      take_share(choice.mass);
    } else if (name == "min") {
      take_count(choice.min_keys);
    } else if (name == "max") {
      take_count(choice.max_keys);
    } else {
      refuse_target(text);
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (!choice.any() || (choice.max_keys != 0 && choice.min_keys > choice.max_keys)) {
    refuse_target(text);
  }
  return choice;
}

std::vector<BudgetChoice> cross_budgets(const std::vector<AttendChoice>& attends,
                                        const std::vector<std::string>& tails,
                                        const std::vector<std::string>& targets) {
  auto all_tails = parse_all<TailChoice>("--tail", tails, parse_tail);
  const auto all_targets = parse_all<TargetChoice>("--target", targets, parse_target);
  // Targets read partitions also where there is no tail.
  uint32_t common = KEYHOLE_AUTO;
  bool agreed = true;
  for (const TailChoice& tail : all_tails) {
    if (tail.mode == KEYHOLE_TAIL_NONE || tail.mode == KEYHOLE_TAIL_CODES) continue;
    agreed = agreed && (common == KEYHOLE_AUTO || common == tail.keys_per_partition);
    common = tail.keys_per_partition;
  }
  for (TailChoice& tail : all_tails) {
    if (tail.mode == KEYHOLE_TAIL_NONE && agreed) tail.keys_per_partition = common;
  }
  std::vector<BudgetChoice> out;
  for (const AttendChoice& attend : attends) {
    for (const TailChoice& tail : all_tails) {
      for (const TargetChoice& target : all_targets) {
        const BudgetChoice choice{attend, tail, target};
        // Nothing would be read.
        if (attend.mode == KEYHOLE_ATTEND_NONE && !choice.needs_partitions() &&
            !choice.reads_codes()) {
          continue;
        }
        out.push_back(choice);
      }
    }
  }
  if (out.empty()) throw UsageError("--attend none needs a --tail or a --target");
  return out;
}

std::vector<BudgetChoice> with_numbers(const std::vector<BudgetChoice>& choices,
                                       const BudgetNumbers& numbers) {
  const auto or_auto = [](const std::vector<uint32_t>& keys) {
    return keys.empty() ? std::vector<uint32_t>{0} : keys;
  };
  std::vector<BudgetChoice> out;
  bool taken = numbers.min_keys.empty() && numbers.max_keys.empty();
  for (BudgetChoice choice : choices) {
    choice.exact_rows = numbers.exact_rows;
    if (!choice.needs_partitions() || choice.target.any()) {
      out.push_back(choice);
      continue;
    }
    taken = true;
    for (const uint32_t least : or_auto(numbers.min_keys)) {
      for (const uint32_t most : or_auto(numbers.max_keys)) {
        if (most != 0 && least > most) {
          throw UsageError("--min-keys " + std::to_string(least) + " with --max-keys " +
                           std::to_string(most) + ": allowed: at most as many");
        }
        choice.target.min_keys = least;
        choice.target.max_keys = most;
        out.push_back(choice);
      }
    }
  }
  if (!taken) {
    throw UsageError(
        "--min-keys and --max-keys need a --tail mean, centroid or second; with a --target they "
        "are its min=N and max=N");
  }
  return out;
}

uint32_t common_partition(const std::vector<BudgetChoice>& choices) {
  uint32_t common = KEYHOLE_AUTO;
  for (const BudgetChoice& choice : choices) {
    const uint32_t keys = choice.tail.keys_per_partition;
    if (!choice.needs_partitions() || keys == KEYHOLE_AUTO) continue;
    if (common != KEYHOLE_AUTO && common != keys) {
      throw UsageError("--tail gives " + std::to_string(common) + " and " + std::to_string(keys) +
                       " keys per partition; allowed: one size for all");
    }
    common = keys;
  }
  return common;
}

}  // namespace keyhole::tools
