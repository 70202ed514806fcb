// compare's results as a table, JSON and CSV.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/common/head_measure.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// The version of the JSON result, raised where a field changes its meaning or goes; docs/compare.schema.json
/// describes it.
inline constexpr int kCompareVersion = 1;

/// Heads of at least this middle mass are heavy: an index can do something for them.
inline constexpr double kHeavyMass = 0.2;

/// One index with one budget (way to attend, tail, target) over all measured heads.
struct Summary {
  /// The mean of every figure weighted by the heads' middle mass (how much of the attention is at stake there); the
  /// plain mean where all of it is zero.
  Measurement mean;
  size_t heads = 0;
  /// The plain mean over the heads of at least kHeavyMass; zeros where there are none.
  Measurement heavy_mean;
  size_t heavy_heads = 0;
  double build_seconds_total = 0;
  double memory_per_key_total = 0;  ///< bytes of indexes and tails for one key of every head
  /// The costs for which no other summary is better: "time", "bytes", "memory"; see mark_fronts().
  std::vector<std::string> fronts;
};
/// A summary for each index and budget, in the order in which they first appear in `results`.
[[nodiscard]] std::vector<Summary> summarise(const std::vector<Measurement>& results);

/// Fills in the fronts: for each cost the Pareto front of it and the median output error (or 1 - recall where a
/// summary has no error).
void mark_fronts(std::vector<Summary>& summaries);
/// The meaning of a table's column of fronts.
inline constexpr const char* kFrontMeaning =
    "front: no other row is better in this cost (time: p50, bytes: read/step, memory: bytes/key) "
    "and "
    "in error p50.";

/// What the rows of summaries are sorted by, the least first. none: the order of the plan.
enum class SortBy { none, error, bytes, us };
void sort(std::vector<Summary>& summaries, SortBy by);

[[nodiscard]] nlohmann::ordered_json to_json(const Measurement& measurement);
[[nodiscard]] nlohmann::ordered_json to_json(const Summary& summary);
[[nodiscard]] std::string to_csv(const std::vector<Measurement>& results);

/// Tables: a row per index and budget with weighted means; such rows with plain means over heavy heads; a row per
/// head. Columns of tails and targets are there where a row has one.
[[nodiscard]] std::string heavy_table(const std::vector<Summary>& summaries, const Style& style);
[[nodiscard]] std::string summary_table(const std::vector<Summary>& summaries, const Style& style);
[[nodiscard]] std::string head_table(const std::vector<Measurement>& results, const Style& style);

}  // namespace keyhole::tools
