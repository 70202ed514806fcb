// A step of one KV head whose budget has a tail or a target: attends to what the search came upon, reads on until
// the target is met, and lets the partitions that were not read stand for their keys.
#pragma once

#include <span>
#include <vector>

#include "cpu/attention.h"
#include "index/tail/tail_estimate.h"
#include "runtime/budget.h"

namespace keyhole::runtime {

struct TailWork {
  const index::TailTree* tree = nullptr;  ///< null: no tail, no target
  index::TailMode mode = index::TailMode::none;
  index::ReadGoal goal;
  /// States of what the group attends to beside the tree's rows, o `[group, dim]`, lse `[group]`: what a target
  /// and the estimates are relative to. Null: nothing, or not known.
  StateView other;
};

/// What a budget with a tail or target asks of `tree`.
[[nodiscard]] TailWork tail_work(const Budget& budget, const index::TailTree& tree);

struct TailCost {
  uint32_t keys_opened = 0;       ///< read for a target
  uint64_t bytes_read = 0;        ///< of means and row numbers
  uint64_t key_bytes_read = 0;    ///< of K and V of opened keys
  double seconds = 0.0;           ///< in estimates
  bool missed = false;            ///< a target is not met
  float missing[kMaxGroup] = {};  ///< estimated share of the mass that was not read
  float error[kMaxGroup] = {};    ///< estimated |o - o*| / |o*|
};

/// One worker's room; steps allocate nothing.
class TailReader {
 public:
  void prepare(const index::TailTree& tree, uint32_t group);
  [[nodiscard]] bool has_room(const index::TailTree& tree, uint32_t group) const;

  /// What has been found: rows, and their scores for all heads.
  struct Found {
    /// `[group]` the share of the tree's mass that the search believes `rows` to hold (SparQ's alpha): with
    /// TailMode::mean and no target, it stands in for the partitions' weights. Null: not known.
    const float* coverage = nullptr;
    std::span<const uint32_t> rows;  ///< distinct
    const float* scores = nullptr;   ///< exact inner products, or null: not known
    size_t stride = 0;
    const float* caps = nullptr;  ///< as index::TailQuery::caps; null: not known
  };
  /// Writes the state of the rows read, and of the tail (0, -inf for TailMode::none). queries `[group, dim]`.
  TailCost attend(const cpu::Kernels& kernels, const KvView& kv, const float* queries,
                  uint32_t group, const LogitParams& logits, const TailWork& work,
                  const Found& found, StateView read, StateView tail);

  /// The distinct rows that the last attend() read.
  [[nodiscard]] std::span<const uint32_t> rows() const { return {rows_.data(), count_}; }
  [[nodiscard]] size_t bytes() const;

 private:
  struct Step;
  void score(const Step& step, size_t begin, size_t end);
  void norms(const Step& step, StateView read, StateView tail, float* out);
  void see(const Step& step, StateView read);
  /// SparQ's correction: alpha of what was read, 1 - alpha of the mean value.
  void stand_in(const Step& step, const float* coverage, StateView read, StateView tail,
                TailCost& cost);

  index::TailEstimate estimate_;
  std::vector<uint32_t> rows_;
  std::vector<float> scores_;  // `[group, room_]`
  size_t room_ = 0, count_ = 0;
  uint32_t room_group_ = 0;
  std::vector<float> spare_o_, spare_lse_;  // states `[2, group, dim]`
  float seen_lse_[kMaxGroup];
};

}  // namespace keyhole::runtime
