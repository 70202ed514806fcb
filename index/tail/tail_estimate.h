// An estimate of the keys that a step has not read: what they weigh, what they add to its output, and which of them
// to read next.
//
// A partition of a TailTree has the weight w = n * exp(logit of the mean key + t/2), where t = (slope of the logit)^2
// * |q|^2 * the mean variance of a key's element, both in the tree's balanced space: the second cumulant of the
// logits inside the partition, for keys that spread alike in all directions. Measured on trained attention heads, the
// mean alone finds 20-47 % of the missing mass, the second-order term 93-100 %; a full diagonal variance is no better
// and explodes on sharp heads. A partition that has been read in part counts, exactly, with the mean key and mean
// value of the keys that are left: their sums are those of the partition less what was read.
//
// The means leave an error: a partition's weight is off by about w * sqrt((e^t - 1) / n), and its value by as much
// again. So partitions are looked at closer (coarse ones divided, fine ones read) in the order of w^2 (e^t - 1) / n.
#pragma once

#include <span>
#include <vector>

#include "cpu/attention.h"
#include "index/graph/row_marks.h"
#include "index/tail/tail_tree.h"

namespace keyhole::index {

enum class TailMode : uint8_t { none, mean, centroid, second };

/// One group's step. Arrays are the caller's and stay valid until the step is over.
struct TailQuery {
  const float* queries = nullptr;  ///< `[group, dim]`
  uint32_t group = 0;
  LogitParams logits;
  TailMode mode = TailMode::second;
  /// `[group]` ln of the sum of e^logit over everything that is attended exactly, the read rows included; -inf:
  /// nothing is.
  const float* seen_lse = nullptr;
  /// `[group]` a logit that no unread row is believed to exceed; null: seen_lse.
  const float* caps = nullptr;
};

/// Rows of the tree that are attended exactly, with their scores for all heads.
struct ReadRows {
  std::span<const uint32_t> rows;  ///< distinct, each < tree.count()
  const float* scores = nullptr;   ///< scores[h * stride + i] = queries[h] . key rows[i]
  size_t stride = 0;
};

/// The goal of reading. A field of 0 sets no goal.
struct ReadGoal {
  float error = 0.0F;     ///< estimated |o - o*| / |o*| at most, every head
  float mass = 0.0F;      ///< share of the mass that is attended exactly at least, every head
  uint32_t min_rows = 0;  ///< distinct rows read at least
  uint32_t max_rows = 0;  ///< distinct rows read at most
};

/// One worker's memory for estimates. reserve() sizes it for a tree and group and all smaller ones; nothing else
/// allocates.
class TailEstimate {
 public:
  /// Takes memory. Strong guarantee: an allocation that fails leaves the object as it was.
  void reserve(const TailTree& tree, uint32_t group);
  /// Whether an estimate over `tree` for `group` heads needs no reserve().
  [[nodiscard]] bool fits(const TailTree& tree, uint32_t group) const;

  /// Begins a step: ranks the coarse partitions, divides those that matter, takes `read` out. The arrays of
  /// query and read stay in place and unchanged until the step is over.
  void begin(const TailTree& tree, const cpu::Kernels& kernels, const TailQuery& query,
             const ReadRows& read);

  /// Returns rows to read next, whole partitions less what is read already: enough to meet the goal by the estimate,
  /// unless nothing is left or `already` + their number would exceed goal.max_rows. Empty: the goal is met, or cannot
  /// be. out_norms `[group]`: |o| of what is attended so far. Valid until the next call; take_in() follows.
  [[nodiscard]] std::span<const uint32_t> next_rows(const ReadGoal& goal, size_t already,
                                                    const float* out_norms);
  /// Takes in the rows of next_rows(), whose scores are known now. seen_lse `[group]` as in TailQuery, with these
  /// rows.
  void take_in(const float* seen_lse);
  /// Whether the goal is met, by the estimate.
  [[nodiscard]] bool met(const ReadGoal& goal, size_t rows, const float* out_norms) const;

  /// Writes the tail's state: that of every row of the tree that was not read. values: those of the rows of the tree.
  void state(const RowsView& values, StateView out);

  /// The estimated share of the mass that was not read, of all that seen_lse and the tree hold.
  [[nodiscard]] float missing(uint32_t head) const;
  /// The estimated |o - o*| / |o*| with the tail in the output; out_norm = |o|.
  [[nodiscard]] float error(uint32_t head, float out_norm) const;

  /// Bytes of means, variances and row numbers that the step has looked at.
  [[nodiscard]] uint64_t bytes_read() const { return bytes_read_; }
  [[nodiscard]] size_t bytes() const;

 private:
  // A position is a partition under consideration: first the coarse ones, [0, coarse_), then the fine ones of those
  // that have been divided.
  /// Writes the scores of positions [at, at + n), without the centre's score; finish_scores() follows, for many at
  /// once.
  void score(const int8_t* codes, size_t at, size_t n);
  /// Adds the centre's score to positions from `begin` on, and takes out what was read.
  void finish_scores(size_t begin);
  /// Puts the fine partitions of a coarse one in its place.
  void divide(uint32_t coarse);
  /// Divides the coarse partitions that are the least certain.
  void divide_best();
  void subtract(size_t first_position);
  /// Raises the shifts to the means of positions from `begin` on. Returns true if one has changed: weights are then
  /// relative to another shift.
  bool raise_shifts(size_t begin);
  void weigh(size_t begin, size_t end);
  void add_up();
  void place_read();
  /// The position of the partition that holds read_.rows[i].
  [[nodiscard]] size_t position_of_read(size_t i) const;
  [[nodiscard]] uint32_t fine_at(size_t position) const { return fine_ids_[position - coarse_]; }
  /// The positions below `count` with the largest merits, at most `most`, in no order.
  [[nodiscard]] std::span<uint64_t> best(size_t count, size_t most);

  // tail_goals.cpp
  /// What a goal allows to stay unread, and which heads exceed it.
  struct Limits;
  [[nodiscard]] Limits limits(const ReadGoal& goal, size_t rows, const float* out_norms) const;
  /// Writes the merits of positions: by how much one row read there (or what costs as much) brings heads nearer to
  /// their limits.
  void rate(const Limits& limits);
  /// Takes the fine partition at a position out of what is unread. Writes its rows that are not read yet and returns
  /// their number.
  size_t open(size_t position, uint32_t* rows);

  // tail_state.cpp
  /// Whether a partition is heavy enough to stand for its rows with its own mean value.
  [[nodiscard]] bool keeps(size_t position) const;

  const TailTree* tree_ = nullptr;
  const cpu::Kernels* kernels_ = nullptr;
  TailQuery query_;
  ReadRows read_;  // the rows given to begin()
  KeyCodes::Queries codes_{};
  float center_scores_[kMaxGroup] = {}, square_norms_[kMaxGroup] = {}, shifts_[kMaxGroup] = {},
        caps_[kMaxGroup] = {};
  float margins_[kMaxGroup] = {};            // of the logits of means
  float seen_lse_[kMaxGroup] = {};           // -inf: nothing is seen
  float least_[kMaxGroup] = {};              // weights that count on their own, see keeps()
  double seen_[kMaxGroup] = {};              // e^(seen_lse - shift)
  double unread_[kMaxGroup] = {};            // sum of weights
  double uncertainty_sums_[kMaxGroup] = {};  // sum of uncertainties
  size_t coarse_ = 0;                        // positions of coarse partitions
  size_t count_ = 0;                         // positions in use
  bool is_marked_ = false;                   // the rows of read_ are in marks_
  uint64_t bytes_read_ = 0;

  // The capacities in positions, rows and heads; the arrays below have these sizes.
  size_t capacity_ = 0, row_capacity_ = 0;
  uint32_t group_capacity_ = 0;
  std::vector<float> scores_, weights_, uncertainties_;  // `[group, capacity_]`
  std::vector<float> kept_weights_;                      // `[group, capacity_]`
  std::vector<float> sizes_;      // `[capacity_]` rows that are not read; 0: none, or divided
  std::vector<float> variances_;  // `[capacity_]`
  // Used by subtract(): `[capacity_]` and `[capacity_, group]`; all zero between calls.
  std::vector<float> removed_, removed_scores_;
  std::vector<float> merits_;            // `[capacity_]`
  std::vector<uint32_t> fine_ids_;       // `[capacity_]` of position coarse_ + i
  std::vector<uint32_t> base_;           // `[coarse]` where its fine ones begin; 0: not divided
  std::vector<uint32_t> touched_, ids_;  // `[capacity_]`
  std::vector<uint64_t> ranks_, spare_;  // `[capacity_]`
  std::vector<uint32_t> rows_;           // `[row_capacity_]` of next_rows()
  std::vector<uint32_t> read_fine_, read_coarse_;  // `[row_capacity_]` partitions of read_.rows
  std::vector<uint32_t> read_ids_;   // `[row_capacity_]` of state(): rows whose values leave a mean
  std::vector<float> read_weights_;  // `[group, row_capacity_]`
  RowMarks marks_;
};

}  // namespace keyhole::index
