// The k best (score, row) pairs of a stream of scores, one stream per head, without allocation.
//
// A score and its row are packed into one 64-bit rank whose integer order is the contract's order: higher
// score first, then smaller row. The order is total, so the result does not depend on the order in
// which rows were offered. Between offers only pairs that can still be among the best k are kept: those
// below the k-th best seen so far are skipped sixteen at a time, the rest goes to a buffer that is cut back
// to k (selection, not sorting) whenever it is full. At k = 100 this costs a tenth of the scoring of 32k fp16
// keys; with std::nth_element and branches it was a fifth.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/types.h"
#include "index/index.h"
#include "index/scan/sixteen.h"

namespace keyhole::index {

/// (score, row) as an integer that grows with the score and, for equal scores, falls with the row.
/// -0 counts as 0. NaN (an overflow of finite inputs) ranks below every number.
[[nodiscard]] inline uint64_t pack_rank(float score, uint32_t row) {
  const uint32_t bits = std::bit_cast<uint32_t>(score == score ? score + 0.0F : kMinusInf);
  // Negative floats order backwards, so all their bits are flipped; of the others the sign is. This is done without a
  // branch, because the signs of scores are as good as random.
  const uint32_t ordered =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
  return (uint64_t{ordered} << 32) | (~row & 0xFFFFFFFFU);
}
[[nodiscard]] inline uint32_t rank_row(uint64_t rank) { return ~static_cast<uint32_t>(rank); }
[[nodiscard]] inline float rank_score(uint64_t rank) {
  const auto ordered = static_cast<uint32_t>(rank >> 32);
  return std::bit_cast<float>((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}

/// Moves the k best of n different ranks to the front, in no order.
void select_ranks(uint64_t* ranks, size_t n, size_t k);

/// Sorts ranks, best first. `spare` is memory for n ranks.
void sort_ranks(uint64_t* ranks, uint64_t* spare, size_t n);

/// Top-k of the heads of a group. begin() may grow its memory; nothing else allocates.
class TopK {
 public:
  /// Starts a search for the `k` best of at most `count` offers per head.
  void begin(uint32_t group, uint32_t k, size_t count);

  /// Offers rows first, first+1, ... with their scores.
  void offer(uint32_t head, const float* scores, uint32_t first, size_t n) {
    offer_if_good(head, scores, n, [first](size_t i) { return first + static_cast<uint32_t>(i); });
  }
  /// The score below which no row can be among the best of a head; it rises.
  [[nodiscard]] float floor(uint32_t head) const { return heads_[head].floor; }

  /// Offers rows[i] with scores[i].
  void offer(uint32_t head, const float* scores, const uint32_t* rows, size_t n) {
    offer_if_good(head, scores, n, [rows](size_t i) { return rows[i]; });
  }

  /// Offers one ready rank.
  void offer_rank(uint32_t head, uint64_t rank) {
    Head& h = heads_[head];
    if (rank <= h.threshold) return;
    if (h.size + kSixteen > capacity_) shrink(h);
    h.ranks[h.size++] = rank;
  }

  /// Offers, for every row that is among the best so far, the rows that share its score: others(row) gives a span of
  /// them, rising. No row may come twice.
  template <class Others>
  void offer_equals(const Others& others) {
    for (uint32_t head = 0; head < group_; ++head) {
      Head& h = heads_[head];
      shrink(h);
      const size_t n = h.size;
      std::copy_n(h.ranks, n, spare_.data());  // offers move the ranks
      for (size_t i = 0; i < n; ++i) {
        const uint64_t score = spare_[i] & 0xFFFFFFFF00000000U;
        const std::span<const uint32_t> rows = others(rank_row(spare_[i]));
        for (const uint32_t row : rows.first(std::min<size_t>(rows.size(), k_))) {
          offer_rank(head, score | (~row & 0xFFFFFFFFU));
        }
      }
    }
  }

  /// The best of a head, in no order. Ends the head's stream.
  [[nodiscard]] std::span<const uint64_t> selected(uint32_t head) {
    shrink(heads_[head]);
    return {heads_[head].ranks, heads_[head].size};
  }

  /// Writes ids, scores and counts of every head, best first; rows of `hits` are `k` apart.
  void finish(Hits& hits);

 private:
  struct Head {
    uint64_t* ranks;  ///< `[capacity_]`
    size_t size;
    uint64_t threshold;  ///< a rank must be above it; 0 until k ranks are known
    float floor;         ///< no score below it can pass
  };

  template <class RowOf>
  void offer_if_good(uint32_t head, const float* scores, size_t n, RowOf row_of) {
    Head& h = heads_[head];
    size_t i = 0;
    for (; i + kSixteen <= n; i += kSixteen) {
      if (all_below(scores + i, h.floor)) continue;
      accept_some(h, scores + i, kSixteen, [&](size_t j) { return row_of(i + j); });
    }
    if (i < n) accept_some(h, scores + i, n - i, [&](size_t j) { return row_of(i + j); });
  }

  // n <= kSixteen. Every rank is written, the size moves past those that pass: no branch to mispredict.
  template <class RowOf>
  void accept_some(Head& h, const float* scores, size_t n, RowOf row_of) {
    if (h.size + kSixteen > capacity_) shrink(h);
    uint64_t* end = h.ranks + h.size;
    for (size_t j = 0; j < n; ++j) {
      *end = pack_rank(scores[j], row_of(j));
      end += static_cast<size_t>(*end > h.threshold);
    }
    h.size = static_cast<size_t>(end - h.ranks);
  }

  void shrink(Head& h) const;

  std::vector<uint64_t> ranks_;
  std::vector<uint64_t> spare_;
  Head heads_[kMaxGroup] = {};
  uint32_t group_ = 0;
  uint32_t k_ = 0;
  size_t keep_ = 0;  ///< min(k, count)
  size_t capacity_ = 0;
};

}  // namespace keyhole::index
