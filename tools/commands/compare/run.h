// The work of compare: truths, builds and measurements of all heads, indexes and rivals.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/head_measure.h"
#include "tools/commands/common/head_truth.h"
#include "tools/commands/common/options.h"
#include "tools/commands/compare/rival_run.h"

namespace keyhole::tools {

/// What is compared, with everything filled in that depends on the trace.
struct ComparisonPlan {
  keyhole_dtype kv_dtype = KEYHOLE_F16;
  size_t sink = 0, window = 0;
  unsigned threads = 1;  ///< in all
  unsigned builds_at_once = 1;
  std::vector<const TraceHead*> heads;
  std::vector<SweptIndex> indexes;
  std::vector<SweptRival> rivals;
  std::vector<uint32_t> rival_ks;  ///< keys that rivals are asked for per head
  std::vector<BudgetChoice> budgets;
  std::string classifiers;  ///< a file, or empty
  TruthOptions truth;

  [[nodiscard]] unsigned threads_per_build() const { return threads / builds_at_once; }
};

/// Heads are taken in batches of builds_at_once, whose indexes are built side by side, one thread each
/// (a graph's build is sequential inside), and then measured one after the other on one thread, so that
/// latencies are those of an otherwise idle process. Only one batch lies in memory. An index that differs
/// from the one before it in search parameters alone is not built again, nor are partitions of the same size.
class Comparison {
 public:
  /// Tries every spec at once: throws UsageError for a bad one before hours of work begin. `trace` and
  /// `plan` must outlive the object.
  Comparison(const Trace& trace, const ComparisonPlan& plan);

  /// Shows progress on a terminal. By index and budget in the plan's order, rivals behind indexes, then layer, then KV head.
  [[nodiscard]] std::vector<Measurement> run();

  /// The library's kernel level, e.g. "avx512vnni".
  [[nodiscard]] std::string simd_level() const;

 private:
  class Work;
  struct BuildProgress;
  using Heads = std::span<const TraceHead* const>;

  void run_batch(Heads heads, Work& work, std::vector<Measurement>& out);
  [[nodiscard]] std::vector<IndexHandle> build_all(Heads heads,
                                                   const std::vector<HeadTruth>& truths,
                                                   const std::string& spec, Work& work) const;
  /// Gives the indexes other search parameters; false where they must be built anew.
  [[nodiscard]] static bool set_spec(const std::vector<IndexHandle>& indexes,
                                     const std::string& spec);
  /// The partitions that tails and targets need.
  static void build_tails(const std::vector<IndexHandle>& indexes, uint32_t keys_per_partition);
  /// The plan's budgets, those with partitions of the same size after each other.
  [[nodiscard]] std::vector<BudgetChoice> by_partition() const;
  [[nodiscard]] bool rounds(const TraceHead& head) const;

  const Trace& trace_;
  const ComparisonPlan& plan_;
  Engine engine_;
  Team team_;
};

}  // namespace keyhole::tools
