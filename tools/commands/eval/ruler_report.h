// The results of `eval --task ruler` as tables and as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/eval/ways.h"

namespace keyhole::tools {

/// The answer to one question.
struct RulerAnswer {
  std::string prediction;
  double score = 0.0;
  size_t taken =
      0;  ///< tokens that the session took since the question before, or from its beginning
};

/// What one way to attend made of the samples of a task, sample by sample.
struct RulerRow {
  std::vector<EvalWay> runs;         ///< the way, with the cost of each sample
  std::vector<double> scores;        ///< of each sample: the mean of its questions'
  std::vector<RulerAnswer> answers;  ///< of each question; none of a mean of tasks

  [[nodiscard]] double percent() const { return 100.0 * mean_of(scores); }
};

/// The samples of one task and length, answered in all ways.
struct RulerGroup {
  uint32_t length = 0;
  std::string task;
  size_t units = 0;                                  ///< of the haystack: words, lines, documents
  std::vector<std::vector<std::string>> references;  ///< of each question
  std::vector<RulerRow> rows;
  size_t turns = 1;  ///< questions of a sample
};

/// Of a question of all samples, first, second and so on: the mean score in percent, and the mean of the tokens taken.
struct TurnMean {
  double percent = 0.0, taken = 0.0;
};
[[nodiscard]] std::vector<TurnMean> turn_means(const RulerGroup& group, const RulerRow& row);

/// The way of several runs: what it cost on average; bits of a number are those of all prompts together.
[[nodiscard]] EvalWay mean_way(const std::vector<EvalWay>& runs);

/// Samples with a lower score than by exact attention (lost) and with a higher one (won); nothing where `exact`, its
/// row of the same samples, is null.
[[nodiscard]] std::optional<Swaps> score_swaps(const RulerRow& row, const RulerRow* exact);

/// The groups of each length as one group each, "mean": all tasks have the same number of samples.
[[nodiscard]] std::vector<RulerGroup> mean_groups(const std::vector<RulerGroup>& groups);

/// A table for each length, with the means of all tasks at its end; where a sample has several questions, scores of
/// each of them below.
[[nodiscard]] std::string ruler_text(const std::vector<RulerGroup>& groups);

/// The rows of the groups, one way each, with the answers that are not wholly right.
[[nodiscard]] nlohmann::ordered_json ruler_json(const std::vector<RulerGroup>& groups);

}  // namespace keyhole::tools
