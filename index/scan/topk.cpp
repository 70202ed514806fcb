#include "index/scan/topk.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace keyhole::index {
namespace {

// Below this many ranks std::sort is faster than the counting passes. Above, its mispredicted branches cost
// 2x at 200 ranks and 6x at 1000.
constexpr size_t kRadixFrom = 64;
constexpr size_t kDigits = 8;  // of 8 bits
constexpr size_t kBuckets = 256;

size_t digit(uint64_t rank, size_t d) { return (rank >> (8 * d)) & (kBuckets - 1); }

// Least significant digit first, descending. Digits on which all ranks agree (the high bits of row numbers)
// cost nothing.
void radix_sort(uint64_t* ranks, uint64_t* spare, size_t n) {
  uint32_t starts[kDigits][kBuckets] = {};
  for (size_t i = 0; i < n; ++i) {
    for (size_t d = 0; d < kDigits; ++d) ++starts[d][digit(ranks[i], d)];
  }
  uint64_t* from = ranks;
  uint64_t* to = spare;
  for (size_t d = 0; d < kDigits; ++d) {
    uint32_t* start = starts[d];
    if (start[digit(from[0], d)] == n) continue;
    uint32_t sum = 0;
    for (size_t b = kBuckets; b-- > 0;) sum += std::exchange(start[b], sum);
    for (size_t i = 0; i < n; ++i) to[start[digit(from[i], d)]++] = from[i];
    std::swap(from, to);
  }
  if (from != ranks) std::copy(from, from + n, ranks);
}

}  // namespace

void select_ranks(uint64_t* ranks, size_t n, size_t k) {
  // Quickselect whose partition has no branch on the data: std::nth_element mispredicts every other
  // comparison and takes five times as long. Ranks differ, so equal keys cannot stall it; a bad run of
  // pivots can, and is left to nth_element's guarantee.
  size_t begin = 0;
  size_t end = n;
  for (int round = 0; round < 64; ++round) {
    if (k <= begin || k >= end) return;
    if (end - begin <= 8) break;
    uint64_t a = ranks[begin];
    const uint64_t b = ranks[begin + (end - begin) / 2];
    uint64_t c = ranks[end - 1];
    if (a > c) std::swap(a, c);
    const uint64_t pivot = std::clamp(b, a, c);  // the median of three
    size_t middle = begin;
    for (size_t i = begin; i < end; ++i) {
      const uint64_t rank = ranks[i];
      ranks[i] = ranks[middle];
      ranks[middle] = rank;
      middle += static_cast<size_t>(rank > pivot);
    }
    // [begin, middle) > pivot >= [middle, end)
    if (k <= middle) {
      end = middle;
    } else {
      begin = middle;
    }
  }
  std::nth_element(ranks + begin, ranks + k, ranks + end, std::greater<>());
}

void sort_ranks(uint64_t* ranks, uint64_t* spare, size_t n) {
  if (n < kRadixFrom) {
    std::sort(ranks, ranks + n, std::greater<>());
  } else {
    radix_sort(ranks, spare, n);
  }
}

void TopK::begin(uint32_t group, uint32_t k, size_t count) {
  group_ = group;
  k_ = k;
  keep_ = std::min<size_t>(k, count);
  // A selection over 2k+ ranks per k+ accepted ones costs a few operations per accepted rank. Never more
  // than there can be offers: then everything fits and nothing is ever cut (k covers the whole index).
  capacity_ = std::min(2 * keep_ + 64, count) + kSixteen;
  const size_t needed = group * capacity_;
  if (ranks_.size() < needed)
    ranks_.resize(needed + needed / 4);  // appends grow the index in steps
  if (spare_.size() < keep_) spare_.resize(keep_ + keep_ / 4);
  for (uint32_t h = 0; h < group; ++h) {
    heads_[h] = {ranks_.data() + h * capacity_, 0, 0, kMinusInf};
  }
}

void TopK::shrink(Head& h) const {
  if (h.size <= keep_) return;
  select_ranks(h.ranks, h.size, keep_);
  h.size = keep_;
  h.threshold = *std::min_element(h.ranks, h.ranks + keep_);
  h.floor = rank_score(h.threshold);
}

void TopK::finish(Hits& hits) {
  for (uint32_t head = 0; head < group_; ++head) {
    Head& h = heads_[head];
    shrink(h);
    sort_ranks(h.ranks, spare_.data(), h.size);
    uint32_t* ids = hits.ids + size_t{head} * k_;
    float* scores = hits.scores + size_t{head} * k_;
    for (size_t i = 0; i < h.size; ++i) {
      ids[i] = rank_row(h.ranks[i]);
      scores[i] = rank_score(h.ranks[i]);
    }
    hits.counts[head] = static_cast<uint32_t>(h.size);
  }
}

}  // namespace keyhole::index
