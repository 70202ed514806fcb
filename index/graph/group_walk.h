// Best-first search of a graph by all heads of a group at once: each head has a frontier of its own, but a key
// that one of them reaches is fetched once and scored for all, and a list that one has read is not read again.
//
// A walk waits for memory twice for each row that it expands: for its list of links, then for the keys that the list
// names. So several expansions are under way at any time, in three stages: CHOOSE the best rows of a head and ask for
// their lists; GATHER the rows they link to that are new and ask for their keys; SCORE those keys for all heads.
// Between two stages of one expansion come stages of the others.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "index/graph/frontier.h"
#include "index/graph/graph.h"
#include "index/grow.h"
#include "index/scan/collector.h"

namespace keyhole::index {

class GroupWalk {
 public:
  /// Reserves memory for graphs of `nodes` rows and lists of `width` links, for a group and beams of `ef`.
  void reserve(size_t nodes, size_t width, uint32_t group, size_t ef, size_t starts) {
    if (tags_.size() < nodes) {
      tags_.assign(nodes + nodes / 4, 0);  // appends grow an index in steps
      tag_ = 0;
    }
    grow(frontiers_, group);
    for (Frontier& frontier : frontiers_) frontier.reserve(ef);
    const size_t most = std::max(kListsAtOnce * width, starts);
    grow(scores_, most * group);
    for (Expansion& e : expansions_) grow(e.pending, most);
  }

  /// Walks from `starts` for the heads [begin, end) of a group. keys.score(rows, n, out, stride) scores rows for
  /// all heads of the group, keys.prefetch(row) asks for a key; every scored key goes to
  /// take(rows, scores, stride, n).
  template <class Keys, class Take>
  void run(const Graph& graph, std::span<const uint32_t> starts, uint32_t begin, uint32_t end,
           size_t ef, const Keys& keys, const Take& take) {
    next_tag();
    first_head_ = begin;
    end_head_ = end;
    for (uint32_t h = begin; h < end; ++h) frontiers_[h].start(ef);
    scored_ = 0;
    lists_ = 0;
    for (Expansion& e : expansions_) e.chosen = e.found = 0;
    for (const uint32_t row : starts) gather(row, expansions_[0], keys);
    // In each turn the oldest expansion is scored and its successor chosen, and the one chosen half a round ago is
    // gathered. A head that has nothing to choose may have something again once the others have scored.
    uint32_t head = begin;
    for (uint32_t turn = 0, idle = 0; idle < 2 * kExpansions; ++turn) {
      Expansion& oldest = expansions_[turn % kExpansions];
      Expansion& middle = expansions_[(turn + kExpansions / 2) % kExpansions];
      const bool scored = score(oldest, keys, take);
      choose(oldest, graph, head);
      const bool gathered = middle.chosen > 0;
      gather(middle, graph, keys);
      idle = scored || gathered || oldest.chosen > 0 ? 0 : idle + 1;
    }
  }

  [[nodiscard]] size_t scored() const { return scored_; }  ///< distinct keys
  [[nodiscard]] size_t lists() const { return lists_; }    ///< lists read

 private:
  static constexpr uint32_t kExpansions = 4;  // under way
  static constexpr size_t kListsAtOnce = 4;   // of one expansion

  struct Expansion {
    size_t chosen = 0;  // rows whose lists have been asked for
    uint32_t rows[kListsAtOnce];
    size_t found = 0;  // rows whose keys have been asked for
    std::vector<uint32_t> pending;
  };

  // 16-bit tags: tag_ for a visited row, tag_ + 1 for one whose list has been read. A reset touches memory
  // once in 32,766 searches.
  void next_tag() {
    tag_ = static_cast<uint16_t>(tag_ + 2);
    if (tag_ != 0) return;
    std::fill(tags_.begin(), tags_.end(), uint16_t{0});
    tag_ = 2;
  }

  // Chooses the best unread rows, going through the heads in turn.
  void choose(Expansion& e, const Graph& graph, uint32_t& head) {
    const GraphLinks links{&graph};
    const uint32_t heads = end_head_ - first_head_;
    for (uint32_t without = 0; without < heads && e.chosen < kListsAtOnce;) {
      uint32_t row = 0;
      bool found = false;
      while (!found && frontiers_[head].next(row)) {
        found = tags_[row] == tag_;  // else another head has read its list
      }
      head = head + 1 == end_head_ ? first_head_ : head + 1;
      without = found ? 0 : without + 1;
      if (!found) continue;
      tags_[row] = static_cast<uint16_t>(tag_ + 1);
      links.prefetch(row);
      e.rows[e.chosen++] = row;
    }
    lists_ += e.chosen;
  }

  template <class Keys>
  void gather(uint32_t row, Expansion& e, const Keys& keys) {
    if (tags_[row] >= tag_) return;
    tags_[row] = tag_;
    keys.prefetch(row);
    e.pending[e.found++] = row;
  }
  template <class Keys>
  void gather(Expansion& e, const Graph& graph, const Keys& keys) {
    for (size_t i = 0; i < e.chosen; ++i) {
      const uint32_t* slots = graph.slots(e.rows[i]);
      for (uint32_t l = 0; l < graph.width() && slots[l] != kNoLink; ++l) gather(slots[l], e, keys);
    }
    e.chosen = 0;
  }

  template <class Keys, class Take>
  bool score(Expansion& e, const Keys& keys, const Take& take) {
    const size_t n = std::exchange(e.found, 0);
    if (n == 0) return false;
    keys.score(e.pending.data(), n, scores_.data(), n);
    scored_ += n;
    for (uint32_t h = first_head_; h < end_head_; ++h) {
      frontiers_[h].offer(scores_.data() + h * n, e.pending.data(), n);
    }
    take(e.pending.data(), scores_.data(), n, n);
    return true;
  }

  std::vector<uint16_t> tags_;
  uint16_t tag_ = 0;
  std::vector<Frontier> frontiers_;
  uint32_t first_head_ = 0, end_head_ = 0;  // the heads [first_head_, end_head_) walk
  Expansion expansions_[kExpansions];
  std::vector<float> scores_;  // `[group, n]`
  size_t scored_ = 0;
  size_t lists_ = 0;
};

}  // namespace keyhole::index
