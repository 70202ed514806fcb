// Reads for a KV head whose budget has a tail or a target: attends to what the search found, reads on until the
// target is met, and lets the partitions that were not read stand for their keys.
#pragma once

#include <span>
#include <vector>

#include "index/tail/tail_estimate.h"
#include "runtime/plan/budget.h"
#include "runtime/step/cost.h"
#include "runtime/step/query.h"

namespace keyhole::runtime {

struct TailWork {
  const index::TailTree* tree = nullptr;  ///< null: no tail, no target
  index::TailMode mode = index::TailMode::none;
  index::ReadGoal goal;  ///< its max_rows: beyond what the search has found
  /// States of what the group attends to beside the tree's rows, o `[group, dim]`, lse `[group]`; targets and
  /// estimates are relative to it. Null: nothing, or not known.
  StateView other;
};

/// The work in `tree` of a budget with a tail or target.
[[nodiscard]] TailWork tail_work(const Budget& budget, const index::TailTree& tree);

/// Estimates for a step, per query head.
struct TailFigures {
  float missing[kMaxGroup] = {};  ///< share of the mass that was not read
  float error[kMaxGroup] = {};    ///< |o - o*| / |o*|
};

/// The states that a search leads to: that of the rows that were read, and that of the tail, which stands for all
/// others.
struct SearchStates {
  StateView read;
  StateView tail{};  ///< written if there is a TailTree: (0, -inf) for TailMode::none
};

/// One worker's memory for tails; steps allocate nothing.
class TailReader {
 public:
  /// Takes memory. Strong guarantee: an allocation that fails leaves it unchanged.
  void reserve(const index::TailTree& tree, uint32_t group);
  /// Whether a step over `tree` for `group` heads needs no reserve().
  [[nodiscard]] bool fits(const index::TailTree& tree, uint32_t group) const;

  /// The findings of a search: rows, and their scores for all heads.
  struct Found {
    /// `[group]` the share of the tree's mass that the search believes `rows` to hold (SparQ's alpha). With
    /// TailMode::mean and no target it stands in for the partitions' weights. Null: not known.
    const float* coverage = nullptr;
    std::span<const uint32_t> rows;  ///< distinct
    const float* scores = nullptr;   ///< exact inner products, or null: not known
    size_t stride = 0;
    const float* caps = nullptr;  ///< as index::TailQuery::caps; null: not known
  };
  /// Writes both states. The cost is that of the estimates and of the rows opened for a target, without that of
  /// attending.
  StepCost attend(const GroupQuery& query, const TailWork& work, const Found& found,
                  SearchStates out);

  /// The distinct rows that the last attend() read; below, its estimates.
  [[nodiscard]] std::span<const uint32_t> rows() const { return {rows_.data(), count_}; }
  [[nodiscard]] const TailFigures& figures() const { return figures_; }
  [[nodiscard]] size_t bytes() const;

 private:
  struct Step;
  void begin(const Step& step, const Found& found);
  /// Reads on until the goal is met, or cannot be.
  void read_on(const Step& step, StepCost& cost);
  void take_figures(const Step& step, StateView tail);
  /// Writes |o| of each head, where o merges `read`, what lies elsewhere, and the tail (null: without).
  void norms(const Step& step, StateView tail, float* out);
  /// Takes in the states of the rows that have been read so far.
  void see(const Step& step);
  /// SparQ's correction: a share alpha of the output from what was read, 1 - alpha from the mean value.
  void stand_in(const Step& step, const float* coverage, StateView tail);

  index::TailEstimate estimate_;
  TailFigures figures_;
  std::vector<uint32_t> rows_;  // `[capacity_]`
  std::vector<float> scores_;   // `[group_capacity_, capacity_]`
  size_t capacity_ = 0, count_ = 0;
  uint32_t group_capacity_ = 0;
  std::vector<float> spare_o_, spare_lse_;  // states `[2, group_capacity_, dim]`
  float seen_lse_[kMaxGroup] = {};
};

}  // namespace keyhole::runtime
