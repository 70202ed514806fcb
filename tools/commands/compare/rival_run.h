// The rivals of a comparison: --rival, and how they are built and measured over a batch of heads.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/budget_choice.h"
#include "tools/commands/compare/answer_files.h"
#include "tools/commands/compare/rival_measure.h"

namespace keyhole::tools {

/// A rival's spec without alternatives, and the --rival that it comes from.
struct SweptRival {
  std::string text;  ///< as given
  std::string series;
  RivalSpec spec;
};
/// Expands every --rival into its specs, see expand_sweep(). Throws UsageError for one that is wrong or given twice.
[[nodiscard]] std::vector<SweptRival> expand_rivals(const std::vector<std::string>& rivals);

/// The numbers of keys that rivals are asked for: each K of --attend topk:K once, or `k` where there is none.
[[nodiscard]] std::vector<uint32_t> rival_ks(const std::vector<BudgetChoice>& budgets, uint32_t k);

/// The number of rows that compare shows of a rival.
[[nodiscard]] size_t rows_of(const RivalSpec& spec, const std::vector<uint32_t>& ks);

/// Throws UsageError where one of them cannot be built over keys of this shape.
void check_rivals(const std::vector<SweptRival>& rivals, const RivalShape& shape);

/// The heads on which rivals are measured, and where results go.
struct RivalBatch {
  const Trace& trace;
  std::span<const TraceHead* const> heads;
  const std::vector<HeadTruth>& truths;  ///< of the heads
  keyhole_dtype kv_dtype = KEYHOLE_F16;
  unsigned threads_per_build = 1;
  std::function<bool(const TraceHead&)> rounds_keys;
  std::function<void(double)>
      done;  ///< called with steps: one for each head's build, and for each of its rows
  std::function<void(std::vector<Measurement>)> keep;  ///< called with each row of all heads
  const AnswerFiles* answers = nullptr;                ///< takes what each answered; or null
};
/// Builds each rival over all heads side by side, then measures them one after the other. A rival that differs from
/// the one before it in search parameters alone is not built again. Rows are ordered by rival, number of keys, head.
void measure_rivals(const std::vector<SweptRival>& rivals, const std::vector<uint32_t>& ks,
                    const RivalBatch& batch);

}  // namespace keyhole::tools
