// The work of calibrate: tries every candidate on every head of the traces and keeps the cheapest that meets the
// required error.
#pragma once

#include <string>
#include <vector>

#include "tools/commands/calibrate/choose.h"
#include "tools/commands/calibrate/measure.h"

namespace keyhole::tools {

struct CalibrationPlan {
  struct Candidate {
    std::string index;
    BudgetChoice budget;
    bool searches = false;  ///< for the error target that meets the requirement
  };
  enum class Cost { us, bytes };

  Requirement requirement;
  Cost cost = Cost::us;
  bool may_be_dense = true;
  std::vector<Candidate> candidates;  ///< one that searches after the same without a target
  keyhole_dtype kv_dtype = KEYHOLE_F16;
  size_t sink = 0, window = 0;
  unsigned threads = 1;
  size_t queries = 0;  ///< of each trace, at most
  std::string classifiers;
  std::vector<uint32_t> layers;  ///< empty: all that the first trace has
};

/// The choice for one head.
struct HeadChoice {
  uint32_t layer = 0, kv_head = 0;
  double middle_mass = 0;  ///< attention mass of the offloaded tokens, mean over traces
  bool dense = false;
  std::string index;
  BudgetChoice budget;
  double ratio = 0;        ///< of the requirement, on the queries that chose; above 1: not met
  double check_ratio = 0;  ///< on the others
  double error_median = 0, error_p95 = 0;  ///< on the others
  double us = 0, bytes = 0, attended = 0;  ///< of one step; bytes and keys that it read
  double dense_us = 0, dense_bytes = 0;    ///< of one exact step
  double held_bytes = 0;                   ///< by index and partitions

  [[nodiscard]] bool met() const { return ratio <= 1; }
  [[nodiscard]] bool held() const { return check_ratio <= 1; }
};

class Calibration {
 public:
  /// Tries every spec at once, and checks that the traces are of one model: throws UsageError before hours of work
  /// begin. Without `checks`, every second query of the traces is held out to check the choice.
  Calibration(const std::vector<Trace>& traces, const std::vector<Trace>& checks,
              const CalibrationPlan& plan);

  /// Chooses for every head, by layer, then KV head. Shows progress on a terminal.
  [[nodiscard]] std::vector<HeadChoice> run();

  [[nodiscard]] std::string simd_level() const;

 private:
  class Head;

  [[nodiscard]] std::vector<CalibrationHead> open_heads(const std::vector<Trace>& traces,
                                                        const TraceHead& head);

  const std::vector<Trace>& traces_;
  const std::vector<Trace>& checks_;
  const CalibrationPlan& plan_;
  Engine engine_;
  Team team_;
};

}  // namespace keyhole::tools
