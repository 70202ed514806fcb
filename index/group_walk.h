// Best-first search of a graph by all heads of a group at once: each head has a beam of its own, but a key that
// one of them reaches is fetched once and scored for all, and a list that one has read is not read again.
// Each round expands the best unexpanded row of every head; what that brings, some dozens of keys, is scored
// in one kernel call, so that the loads of one round overlap.
#pragma once

#include <vector>

#include "index/collector.h"
#include "index/frontier.h"
#include "index/graph.h"

namespace keyhole::index {

class GroupWalk {
 public:
  /// Makes room for graphs of `nodes` rows and lists of `width` links, for a group and beams of `ef`.
  void reserve(size_t nodes, size_t width, uint32_t group, size_t ef, size_t starts) {
    if (tags_.size() < nodes) {
      tags_.assign(nodes + nodes / 4, 0);  // appends grow an index in steps
      tag_ = 0;
    }
    const size_t most = std::max(group * kListsAtOnce * width, starts);
    if (frontiers_.size() < group) frontiers_.resize(group);
    for (Frontier& frontier : frontiers_) frontier.reserve(ef);
    if (pending_.size() < most) {
      pending_.resize(most);
      scores_.resize(most * kMaxGroup);
    }
  }

  /// Walks from `starts`. keys.score(rows, n, out, stride) scores rows for all heads, keys.prefetch(row) asks for
  /// a key; every scored key goes to take(rows, scores, stride, n).
  template <class Keys, class Take>
  void run(const Graph& graph, std::span<const uint32_t> starts, uint32_t group, size_t ef,
           const Keys& keys, const Take& take) {
    next_tag();
    for (uint32_t h = 0; h < group; ++h) frontiers_[h].start(ef);
    scored_ = 0;
    lists_ = 0;
    size_t n = 0;
    for (const uint32_t row : starts) n = gather(row, n, keys);
    while (n > 0) {
      keys.score(pending_.data(), n, scores_.data(), n);
      scored_ += n;
      for (uint32_t h = 0; h < group; ++h) {
        frontiers_[h].offer(scores_.data() + h * n, pending_.data(), n);
      }
      take(pending_.data(), scores_.data(), n, n);
      n = expand(graph, group, keys);
    }
  }

  [[nodiscard]] size_t scored() const { return scored_; }  ///< distinct keys
  [[nodiscard]] size_t lists() const { return lists_; }    ///< lists read

 private:
  // Lists that a head reads in a round. More make fewer and larger rounds, and read lists that turn out not
  // to be needed.
  static constexpr size_t kListsAtOnce = 2;

  // 16-bit tags: tag_ for a visited row, tag_ + 1 for one whose list has been read. A reset touches memory
  // once in 32,766 searches.
  void next_tag() {
    tag_ = static_cast<uint16_t>(tag_ + 2);
    if (tag_ != 0) return;
    std::fill(tags_.begin(), tags_.end(), uint16_t{0});
    tag_ = 2;
  }

  template <class Keys>
  size_t gather(uint32_t row, size_t n, const Keys& keys) {
    if (tags_[row] >= tag_) return n;
    tags_[row] = tag_;
    keys.prefetch(row);
    pending_[n] = row;
    return n + 1;
  }

  // Reads lists until there are rows to score, or none is left to read.
  template <class Keys>
  size_t expand(const Graph& graph, uint32_t group, const Keys& keys) {
    const GraphLinks links{&graph};
    size_t n = 0;
    bool walking = true;
    while (n == 0 && walking) {
      uint32_t rows[kMaxGroup * kListsAtOnce];
      size_t count = 0;
      for (uint32_t h = 0; h < group; ++h) {
        uint32_t row = 0;
        for (size_t lists = 0; lists < kListsAtOnce && frontiers_[h].next(row);) {
          if (tags_[row] > tag_) continue;  // another head has read its list
          tags_[row] = static_cast<uint16_t>(tag_ + 1);
          links.prefetch(row);
          rows[count++] = row;
          ++lists;
        }
      }
      walking = count > 0;
      lists_ += count;
      for (size_t i = 0; i < count; ++i) {
        const uint32_t* slots = graph.slots(rows[i]);
        for (uint32_t l = 0; l < graph.width() && slots[l] != kNoLink; ++l) {
          n = gather(slots[l], n, keys);
        }
      }
    }
    return n;
  }

  std::vector<uint16_t> tags_;
  uint16_t tag_ = 0;
  std::vector<Frontier> frontiers_;
  std::vector<uint32_t> pending_;
  std::vector<float> scores_;  // `[group, n]`
  size_t scored_ = 0;
  size_t lists_ = 0;
};

}  // namespace keyhole::index
