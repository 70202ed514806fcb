// The k best (score, row) pairs of a stream of scores, one stream per head, without allocation.
//
// A score and its row are packed into one 64-bit rank whose integer order is the contract's order: higher
// score first, then smaller row. The order is total, so the result does not depend on the order in
// which rows were offered. Between offers only pairs that can still be among the best k are kept: those
// below the k-th best seen so far are skipped sixteen at a time, the rest goes to a buffer that is cut back
// to k (selection, not sorting) whenever it is full.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "cpu/types.h"
#include "index/index.h"

namespace keyhole::index {

/// (score, row) as an integer that grows with the score and, for equal scores, falls with the row.
/// -0 counts as 0. NaN (an overflow of finite inputs) ranks below every number.
[[nodiscard]] inline uint64_t pack_rank(float score, uint32_t row) {
  const uint32_t bits = std::bit_cast<uint32_t>(score == score ? score + 0.0F : kMinusInf);
  const uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return (uint64_t{ordered} << 32) | (~row & 0xFFFFFFFFU);
}
[[nodiscard]] inline uint32_t rank_row(uint64_t rank) { return ~static_cast<uint32_t>(rank); }
[[nodiscard]] inline float rank_score(uint64_t rank) {
  const auto ordered = static_cast<uint32_t>(rank >> 32);
  return std::bit_cast<float>((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}

/// Sorts ranks, best first. `spare` has room for n ranks.
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
  /// Offers rows[i] with scores[i].
  void offer(uint32_t head, const float* scores, const uint32_t* rows, size_t n) {
    offer_if_good(head, scores, n, [rows](size_t i) { return rows[i]; });
  }

  /// Offers one ready rank.
  void offer_rank(uint32_t head, uint64_t rank) {
    Head& h = heads_[head];
    if (rank > h.threshold) accept(h, rank);
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
    constexpr size_t kStride = 16;
    Head& h = heads_[head];
    size_t i = 0;
    for (; i + kStride <= n; i += kStride) {
      // Branch-free, so that it becomes a few vector compares; "not below" lets ties and NaN through.
      int good = 0;
      for (size_t j = 0; j < kStride; ++j) good |= static_cast<int>(!(scores[i + j] < h.floor));
      if (good == 0) continue;
      for (size_t j = i; j < i + kStride; ++j) offer_one(h, scores[j], row_of(j));
    }
    for (; i < n; ++i) offer_one(h, scores[i], row_of(i));
  }

  void offer_one(Head& h, float score, uint32_t row) {
    if (score < h.floor) return;
    const uint64_t rank = pack_rank(score, row);
    if (rank > h.threshold) accept(h, rank);
  }

  void accept(Head& h, uint64_t rank) {
    h.ranks[h.size++] = rank;
    if (h.size == capacity_) shrink(h);
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
