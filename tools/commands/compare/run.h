// The work of compare: truths, builds and measurements of all heads, indexes and rivals.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/head_measure.h"
#include "tools/commands/common/head_truth.h"
#include "tools/commands/common/options.h"
#include "tools/commands/compare/answer_files.h"
#include "tools/commands/compare/other_results.h"
#include "tools/commands/compare/results_file.h"
#include "tools/commands/compare/rival_run.h"
#include "tools/commands/compare/sweep_clock.h"

namespace keyhole::tools {

/// An index spec without alternatives, and the budgets that it is measured with.
struct IndexRun {
  SweptIndex index;
  std::vector<BudgetChoice> budgets;
};

/// What is compared, with everything filled in that depends on the trace.
struct ComparisonPlan {
  std::string trace_path;
  keyhole_dtype kv_dtype = KEYHOLE_F16;
  size_t sink = 0, window = 0;
  unsigned threads = 1;  ///< in all
  unsigned builds_at_once = 1;
  std::vector<const TraceHead*> heads;
  std::vector<IndexRun> indexes;
  std::vector<SweptRival> rivals;
  std::vector<uint32_t> rival_ks;        ///< keys that rivals are asked for per head
  std::vector<OtherResult> others;       ///< of files, shown behind them
  const AnswerFiles* answers = nullptr;  ///< where what is measured goes query by query; or null
  std::string classifiers;               ///< a file, or empty
  TruthOptions truth;

  /// The specs of the indexes.
  [[nodiscard]] std::vector<std::string> specs() const {
    std::vector<std::string> out;
    for (const IndexRun& run : indexes) out.push_back(run.index.spec);
    return out;
  }
  [[nodiscard]] unsigned threads_per_build() const { return threads / builds_at_once; }
};

/// Runs a comparison. Heads are taken in batches of builds_at_once, whose indexes are built side by side, one thread
/// each (a graph's build is sequential inside), and then measured one after the other on one thread, so that
/// latencies are those of an otherwise idle process. Only one batch lies in memory. An index that differs from the
/// one before it in search parameters alone is not built again, nor are partitions of the same size.
class Comparison {
 public:
  /// Tries every spec at once: throws UsageError for a bad one before hours of work begin. `trace` and
  /// `plan` must outlive the object.
  Comparison(const Trace& trace, const ComparisonPlan& plan);

  /// Measures, and shows progress and the time left on a terminal. Rows are ordered by index and budget in the plan's
  /// order, then rivals, then other systems' results, within each by layer, then KV head. `kept`: rows that it has
  /// are not measured again (unless the plan's answers lack them), and new ones are appended as soon as they are
  /// measured; or null.
  [[nodiscard]] std::vector<Measurement> run(ResultsFile* kept);

  /// The library's kernel level, e.g. "avx512vnni".
  [[nodiscard]] std::string simd_level() const;

 private:
  class Work;
  struct BuildProgress;
  using Heads = std::span<const TraceHead* const>;

  /// The measurements that a batch of heads still needs.
  struct Todo;
  [[nodiscard]] Todo todo_of(Heads heads, const ResultsFile* kept) const;
  /// The parts of that work, in the order of run_batch().
  [[nodiscard]] std::vector<SweepClock::Part> parts_of(Heads heads, const Todo& todo) const;
  void run_batch(Heads heads, const Todo& todo, Work& work,
                 const std::function<void(std::vector<Measurement>)>& keep,
                 std::vector<Measurement>& of_others);
  [[nodiscard]] std::vector<IndexHandle> build_all(Heads heads,
                                                   const std::vector<HeadTruth>& truths,
                                                   const std::string& spec, Work& work) const;
  /// Gives the indexes other search parameters; returns false where they must be built anew.
  [[nodiscard]] static bool set_spec(const std::vector<IndexHandle>& indexes,
                                     const std::string& spec);
  /// Builds the partitions that tails and targets need.
  static void build_tails(const std::vector<IndexHandle>& indexes, uint32_t keys_per_partition);
  /// An index's budgets as they work with its spec, ordered so that those with partitions of the same size follow
  /// each other.
  [[nodiscard]] std::vector<BudgetChoice> by_partition(const IndexRun& run) const;
  void put_in_order(std::vector<Measurement>& rows) const;
  [[nodiscard]] bool rounds(const TraceHead& head) const;
  [[nodiscard]] bool is_of(const OtherResult& other, const TraceHead& head) const {
    return is_of_head(other, plan_.trace_path, trace_, head);
  }

  const Trace& trace_;
  const ComparisonPlan& plan_;
  Engine engine_;
  Team team_;
};

}  // namespace keyhole::tools
