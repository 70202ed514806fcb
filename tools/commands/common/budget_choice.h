// `--attend`, `--tail` and `--target` together: how much of the found keys is attended, what stands for the rest, and
// how good the result shall be.
#pragma once

#include <keyhole/index.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/files/settings.h"
#include "tools/commands/common/attend_choice.h"

namespace keyhole::tools {

/// The choice of what stands for the keys that are not attended.
struct TailChoice {
  keyhole_tail_mode mode = KEYHOLE_TAIL_NONE;
  uint32_t keys_per_partition = KEYHOLE_AUTO;  ///< of tails and targets
  bool given = false;                          ///< by --tail; else it is up to the index type

  /// The choice as text: "none", "second", "centroid:32".
  [[nodiscard]] std::string text() const;
  bool operator==(const TailChoice&) const = default;
};

/// The choice of when a step has read enough; all 0: no target.
struct TargetChoice {
  float error = 0;        ///< output error, at most
  float mass = 0;         ///< share of the attention mass read, at least
  uint32_t min_keys = 0;  ///< of a step with a target; AUTO
  uint32_t max_keys = 0;  ///< AUTO

  /// Whether there is a target.
  [[nodiscard]] bool any() const { return error != 0 || mass != 0; }
  /// The choice as text: "none", "error=0.05", "error=0.05,mass=0.9,min=16,max=4096".
  [[nodiscard]] std::string text() const;
  bool operator==(const TargetChoice&) const = default;
};

/// A choice of all three for one head.
struct BudgetChoice {
  AttendChoice attend;
  TailChoice tail;
  TargetChoice target;
  std::optional<uint32_t> exact_rows = {};  ///< of --exact-rows, see for_index()

  /// Whether it needs partitions of the keys.
  [[nodiscard]] bool needs_partitions() const {
    return (tail.mode != KEYHOLE_TAIL_NONE && !reads_codes()) || target.any();
  }
  /// Whether every key except the heaviest is attended by its code.
  [[nodiscard]] bool reads_codes() const { return tail.mode == KEYHOLE_TAIL_CODES; }
  /// The choice as text: "topk:100" where there is neither tail nor target, else "topk:100 tail=second error=0.05" or
  /// "... tail=second min=512".
  [[nodiscard]] std::string text() const;
  [[nodiscard]] keyhole_search_options search_options() const;
  [[nodiscard]] keyhole_budget budget() const;
  bool operator==(const BudgetChoice&) const = default;
};

/// Turns a budget, e.g. that of a session, into a choice. Its tail and its k count as given.
[[nodiscard]] BudgetChoice choice_of(const keyhole_budget& budget);

/// Reads "none", "codes", "mean", "centroid" or "second", each of the last three with ":KEYS_PER_PARTITION" (4..1024)
/// where wanted. Throws UsageError.
[[nodiscard]] TailChoice parse_tail(const std::string& text);

/// Reads "none" or a list of "error=X", "mass=X" (at least one of them; above 0 and below 1),
/// "min=N", "max=N" (keys). Throws UsageError.
[[nodiscard]] TargetChoice parse_target(const std::string& text);

/// The spec with which the library chooses an index by itself, one with codes.
inline constexpr const char* kAutoIndex = "auto";

/// Whether an index of this spec has codes to attend keys by.
[[nodiscard]] bool has_codes(const std::string& spec);

/// The choice as it works with an index of this spec. With codes all keys are attended by them unless --tail says
/// otherwise; topk without :K then means topk:N of --exact-rows N, 16 where that was not given, none for 0.
[[nodiscard]] BudgetChoice for_index(BudgetChoice choice, const std::string& spec);

/// Combines each attend with each tail and each target, the target varying first; an empty list stands for none. A
/// partition size that a tail gives holds for it alone; `none` takes that of the other tails where they agree. Throws
/// UsageError, also for a text that is given twice.
[[nodiscard]] std::vector<BudgetChoice> cross_budgets(const std::vector<AttendChoice>& attends,
                                                      const std::vector<std::string>& tails,
                                                      const std::vector<std::string>& targets);

/// `--min-keys`, `--max-keys` and `--exact-rows`: the parts of a budget that the three options above do not say.
struct BudgetNumbers {
  std::vector<uint32_t> min_keys, max_keys;  ///< each gives a budget of its own
  std::optional<uint32_t> exact_rows;
};
/// Gives every choice with a tail of partitions and no target (which names its own numbers) each number of keys;
/// others stay as they are. Throws UsageError where numbers of keys were given and no choice takes them.
[[nodiscard]] std::vector<BudgetChoice> with_numbers(const std::vector<BudgetChoice>& choices,
                                                     const BudgetNumbers& numbers);

/// The partition size on which all choices that need partitions agree; AUTO where none names one. Throws UsageError
/// where they differ: a session has one size.
[[nodiscard]] uint32_t common_partition(const std::vector<BudgetChoice>& choices);

/// The help of --tail and --target.
inline const std::string kTailHelp =
    std::string(setting(kBudgetSettings, "tail").help) + ": " +
    words_help(setting(kBudgetSettings, "tail")) +
    "; mean, centroid and second with :KEYS_PER_PARTITION, 4..1024, where wanted. Not given: codes "
    "for an "
    "index of type codes, with topk:16 where --attend names no K, else none";
inline constexpr const char* kTargetHelp =
    "How good a step shall be, by its own estimate: error=X (output error at most X), mass=X "
    "(share of the "
    "attention mass read at least X), both, with min=N and max=N keys; or none";

}  // namespace keyhole::tools
