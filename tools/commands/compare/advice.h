// The advice of compare for a stated goal.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/compare/report.h"

namespace keyhole::tools {

/// A bound on a measured figure.
struct Goal {
  enum class Of { error, latency, memory };
  Of of = Of::error;
  double most =
      0;  ///< output error (median); microseconds (median of a step); bytes of all indexes and tails
  std::string text;  ///< as given, e.g. "latency=60us"
};
/// Reads "error=0.05", "latency=60us" (or ms, s), "memory=4GiB". Throws UsageError.
[[nodiscard]] Goal parse_goal(const std::string& text);
/// Reads several goals. Throws UsageError for two of one kind.
[[nodiscard]] std::vector<Goal> parse_goals(const std::vector<std::string>& texts);

inline constexpr const char* kGoalHelp =
    "Advise the best of the measured indexes that keeps this: error=X (median output error), "
    "latency=T (median step of one KV head, e.g. 60us), memory=B (of all measured heads' indexes "
    "and "
    "tails, e.g. 4GiB); repeatable, all shall hold";

struct Advice {
  std::vector<Goal> goals;
  bool reached = false;  ///< all goals are
  Summary chosen;        ///< the best that reaches them, else what comes nearest
  std::string best_in;  ///< what it is the best in: "output error", "recall", "latency" or "memory"
  double memory_bytes = 0;  ///< its indexes and tails, all measured heads
  double worst_ratio = 0;   ///< of its figures to the goals: above 1 where they are not reached
  size_t candidates = 0, reaching = 0;  ///< ways that were measured, and that reach the goals

  /// The options that choose this way: "--index ivf:probe=32 --attend topk:100 --tail second".
  [[nodiscard]] std::string options() const;
};

/// Advises one way. Of those that reach all goals it is the best in what no goal is about: that of least error; where
/// the error is a goal, the fastest; where the latency is one, too, the smallest. Only ways of `indexes` are advised,
/// because no session can use rivals. Nothing without goals or without a row of an index. `offloaded`: keys of each
/// head.
[[nodiscard]] std::optional<Advice> advise(const std::vector<Summary>& summaries,
                                           const std::vector<Goal>& goals,
                                           const std::vector<std::string>& indexes,
                                           size_t offloaded);

[[nodiscard]] std::string to_text(const Advice& advice);
[[nodiscard]] nlohmann::ordered_json to_json(const Advice& advice);

}  // namespace keyhole::tools
