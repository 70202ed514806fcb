// The choice of the lists of codes that a step reads (index/scan/code_lists.h): for each KV head those whose rows
// weigh, judged by their number, mean key and spread. The work of a head has three stages, and any thread may do any
// part of a stage:
//
//     rank()     a part of the lists: products of the queries with their mean keys
//     choose()   when all have been ranked: which to read, and what the others weigh
//     CodeScan::scan_lists()  a part of the chosen lists by their codes, and of the others by their mean values
//
// To second order the n rows of a list weigh n e^(s + t/2), where s is their mean logit for a head and t = slope^2
// |q|^2 spread its variance. Lists are read in the order of n e^(s + t), because a wide list may hide a row that
// weighs much (the part of a variance above 16 counts less). The order is relative to the head's lightest list, and a
// list counts by the head for which it stands out most: heads whose lists weigh alike lose little by reading few.
// Rows of lists that are not read weigh e^(s + t/2), but no more than e^s of the head's heaviest list, and have their
// list's mean value. Where t > 2 ln n the weight is that of the heaviest of n rows, e^(s + (2 t ln n)^(1/2)), because
// e^(t/2) would outgrow any row's.
//
// The number of lists read is a share of the rows; it does not follow their weights by second order, because a head
// whose weight seems to lie elsewhere is the one that looks for a single row. Of 64 kv and 64 pass-key questions at
// 128k, with 2 bits and lists of 64, 12 % answered 59 and 60 (exact attention: 60 and 60), and 6 % answered 59 and
// 56. Reading until at most 30 % of a head's weight is left, and at most 12 % of the rows, answered 40 and 27 with as
// many rows on average. In an order relative to the head's heaviest list 12 % answered 50 and 35; in the order of s +
// 2 t^(1/2), 59 and 57.
//
// More lists are read, up to all, for heads that look at everything. There the mean value of a list is not that of its
// rows that weigh, and the error grows with the weight W of all unread lists, as a share of that of all lists, and with
// how far values lie from their lists' means, as a share of the output's length. With m the mean value and w the weight
// (see above) of a list, values being in units of their own spread (Balance::value_scale), so that one deviates by 1 in
// each of dim components, a head may leave
//
//     W <= max(miss |o| / dim^(1/2), 1/64)        o = sum over all lists of w m / sum of w
//
// If it leaves more by the rule above, its own lists are read from that of most hope on (by n e^(s + t), in steps of
// 1/32 of a logit, of each head by itself) until what neither rule reads of it is within that; 512 steps below its
// heaviest, all are. A group reads the union over its heads. Sink and window are left out: they are not known here.
// Where second order gives all lists too little, as in heads that lose most, the share W is hardly wrong. Outputs of
// recorded heads are off by a tenth to a fifth of W dim^(1/2) / |o|, mostly, and with miss = 0.7 95 of 100 by at most
// 0.05. By a calculation over these heads (bench/RESULTS.md, "Divergence of a real model"): with a limit on W alone,
// without the output's length, heads read more where nothing is lost; weights by the variance along queries, and lists
// of small t counted less, are no better.
//
// Source: this project. To read by rising rank until a share of the weight is left is top-p sampling's rule, which
// Twilight (Lin et al., 2025) uses for tokens, without regard for values.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "index/scan/code_lists.h"

namespace keyhole::index {

/// Where the kernels of rows in f16 are among those of a dtype.
inline constexpr auto kHalf = static_cast<size_t>(DType::f16);

/// A logit, and the square of its derivative by the score.
struct LogitSlope {
  float logit, slope_squared;
};
[[nodiscard]] inline LogitSlope logit_slope(float score, const LogitParams& logits) {
  const float logit = logits.scale * score;
  if (logits.softcap <= 0.0F) return {logit, logits.scale * logits.scale};
  const float t = std::tanh(logit / logits.softcap);
  const float slope = logits.scale * (1.0F - t * t);
  return {logits.softcap * t, slope * slope};
}

/// The largest of some numbers that are not below 0; 0 of none.
[[nodiscard]] float largest_of(std::span<const float> x);

class ListChoice {
 public:
  /// The most parts of a stage.
  static constexpr uint32_t kMostParts = 32;

  /// Takes memory for up to `lists` lists and groups of `group` heads; keeps what it has where that is enough.
  void reserve(const CodeShape& shape, size_t lists, uint32_t group);

  /// Number of parts of rank() and of scan_lists(). It depends on the number of lists alone.
  [[nodiscard]] static uint32_t rank_parts(size_t lists);
  [[nodiscard]] static uint32_t scan_parts(size_t lists);

  /// Call before the parts of every step. queries: `[group, dim]` as the model has them, valid until the last scan.
  void begin(const CodeLists& lists, const cpu::Kernels& kernels, const float* queries,
             uint32_t group, const LogitParams& logits);
  void rank(uint32_t part);
  void choose(const ListGoal& goal);

  /// May be called after the scan. A list may hold a row that matters for a head if its mean logit plus `deviations`
  /// standard deviations, as the list's longest row would have them, reaches the head's `least`, `[group]` logits.
  /// may_widen() says whether such a list is not read, where a list has a variance above `wide` for some head; widen()
  /// makes such lists read from now on and returns true where there were any.
  [[nodiscard]] bool may_widen(const float* least, float wide, float deviations) const;
  bool widen(const float* least, float deviations);

  // What follows is valid after choose().
  /// The lists to be read, rising.
  [[nodiscard]] std::span<const uint32_t> chosen() const { return {chosen_.data(), chosen_count_}; }
  [[nodiscard]] size_t chosen_rows() const { return chosen_rows_; }
  /// The products of the queries with the lists' mean keys: `[group]` rows of stride() elements.
  [[nodiscard]] const float* scores() const { return scores_.data(); }
  [[nodiscard]] size_t stride() const { return stride_; }
  /// What the rows of every list that is not read weigh together, beside e^tops(); 0 where the list is read: `[group]`
  /// rows of stride() elements.
  [[nodiscard]] const float* weights() const { return weights_.data(); }
  /// `[group]` the largest mean logit over all lists.
  [[nodiscard]] const float* tops() const { return tops_; }
  /// The queries in the space of the codes, `[group, dim]`, and their |q|^2, `[group]`.
  [[nodiscard]] const float* rows() const { return rows_.data(); }
  [[nodiscard]] const float* norms() const { return norms_; }
  /// Whether one of them is beyond kLongestQuery.
  [[nodiscard]] bool has_beyond() const { return has_beyond_; }

  [[nodiscard]] size_t bytes() const;

 private:
  /// Whether a row of list `number`, which is number `i` of the chunk, may reach a head's bound, given as an inner
  /// product.
  [[nodiscard]] bool reaches(const CodeChunk& chunk, size_t i, size_t number, const float* bounds,
                             float deviations) const {
    for (uint32_t h = 0; h < group_; ++h) {
      const float far = deviations * std::sqrt(norms_[h] * chunk.widest[i]);
      if (scores_[h * stride_ + number] + far > bounds[h]) return true;
    }
    return false;
  }
  /// Computes hopes_, and logits of mean weights in weights_, for the lists [from, to) of a chunk that begins with list
  /// `first`.
  void weigh(const CodeChunk& chunk, size_t first, size_t from, size_t to, uint32_t part);
  /// Makes weights of the logits in weights_.
  void weigh_lists();
  /// Has more lists read, of each head those of most hope, until the others hold no more than ListGoal::miss allows.
  void choose_more(float miss);
  /// Adds up the mean values of all lists by weights_, in means_.
  void add_values();
  /// The most weight that a head may leave in lists, by ListGoal::miss, after add_values().
  [[nodiscard]] float largest_left(uint32_t head, float miss) const;
  /// Makes chosen_ of the lists whose size is 0, and takes their weights out.
  void leave_out_chosen();

  const CodeLists* lists_ = nullptr;
  const cpu::Kernels* kernels_ = nullptr;
  uint32_t group_ = 0;
  LogitParams logits_{};
  size_t stride_ = 0;
  std::vector<float> rows_;   // `[group, dim]`
  std::vector<float> means_;  // `[group, dim]`
  float norms_[kMaxGroup] = {};
  bool has_beyond_ = false;
  std::vector<float> scores_;                    // `[group, lists]`
  std::vector<float> hopes_;                     // `[group, lists]` ln n + s + t
  std::vector<float> weights_;                   // `[group, lists]`
  std::vector<float> gains_;                     // `[lists]`
  std::vector<float> sizes_;                     // `[lists]` rows, 0 where the list is read
  float part_tops_[kMostParts][kMaxGroup] = {};  // the largest hopes of each part
  float part_lows_[kMostParts][kMaxGroup] = {};
  float part_logits_[kMostParts][kMaxGroup] = {};
  std::vector<uint32_t> chosen_;
  size_t chosen_count_ = 0, chosen_rows_ = 0;
  float tops_[kMaxGroup] = {}, most_hoped_[kMaxGroup] = {};
};

}  // namespace keyhole::index
