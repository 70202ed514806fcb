// A navigable graph over rows: level 0 holds every row in fixed-width lists, a few rows stand on upper
// levels as well (HNSW). Compact and plain, so that a search needs one load per list and truncation,
// checks and saving are simple; how edges are chosen is decided by the builders.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu/memory.h"
#include "index/scan/twins.h"
#include "index/serial.h"

namespace keyhole::index {

/// Marks an empty slot of a list (kMaxRows keeps it from being a row).
inline constexpr uint32_t kNoLink = 0xFFFFFFFF;

class Graph {
 public:
  /// A row that also stands on levels 1..levels.
  struct Tower {
    uint32_t row;
    uint32_t levels;
    uint32_t first_list;  ///< its list on level 1; level 2 follows, ...
  };

  Graph() = default;
  /// Makes `nodes` rows without links. `width`: links per row on level 0; `upper_width`: on the levels above. Memory
  /// is reserved, but not yet used, for `capacity` rows where that is more.
  Graph(size_t nodes, uint32_t width, uint32_t upper_width, size_t capacity = 0);

  /// Copies the rows that are there, with capacity for these alone.
  Graph(const Graph& o)
      : nodes_(o.nodes_),
        width_(o.width_),
        upper_width_(o.upper_width_),
        links_(o.links_.copy(nodes_ * width_ * sizeof(uint32_t))),
        towers_(o.towers_),
        upper_(o.upper_),
        entry_row_(o.entry_row_),
        entry_tower_(o.entry_tower_) {}
  Graph(Graph&&) = default;
  Graph& operator=(Graph&&) = default;

  /// Adds rows without links up to `nodes`; moves the lists where they exceed the capacity.
  void resize(size_t nodes);

  [[nodiscard]] size_t nodes() const { return nodes_; }
  [[nodiscard]] uint32_t width() const { return width_; }
  [[nodiscard]] uint32_t upper_width() const { return upper_width_; }

  /// The level-0 slots of a row, `width()` of them; links first, then kNoLink.
  [[nodiscard]] uint32_t* slots(uint32_t row) {
    return reinterpret_cast<uint32_t*>(links_.data()) + size_t{row} * width_;
  }
  [[nodiscard]] const uint32_t* slots(uint32_t row) const {
    return reinterpret_cast<const uint32_t*>(links_.data()) + size_t{row} * width_;
  }
  /// The level-0 links of a row.
  [[nodiscard]] std::span<const uint32_t> links(uint32_t row) const {
    return filled(slots(row), width_);
  }

  /// Rows with upper levels, rising. Links between towers are positions in this array.
  [[nodiscard]] std::span<const Tower> towers() const { return towers_; }
  [[nodiscard]] std::span<const uint32_t> upper_links(uint32_t tower, uint32_t level) const {
    return filled(upper_slots(tower, level), upper_width_);
  }
  [[nodiscard]] uint32_t* upper_slots(uint32_t tower, uint32_t level) {
    return const_cast<uint32_t*>(std::as_const(*this).upper_slots(tower, level));
  }
  [[nodiscard]] const uint32_t* upper_slots(uint32_t tower, uint32_t level) const {
    return upper_.data() + (size_t{towers_[tower].first_list} + level - 1) * upper_width_;
  }
  /// Adds a tower with empty lists; rows must come in rising order. Invalidates slot pointers.
  void add_tower(uint32_t row, uint32_t levels);

  /// Where searches start: a row, and its tower (kNoLink where there is none at all).
  [[nodiscard]] uint32_t entry_row() const { return entry_row_; }
  [[nodiscard]] uint32_t entry_tower() const { return entry_tower_; }
  void set_entry(uint32_t row) {
    entry_row_ = row;
    entry_tower_ = kNoLink;
  }
  /// Makes the lowest row among the tallest towers the entry, row 0 where there are none.
  void choose_entry();

  /// Drops the rows >= count and every link to them, and chooses the entry anew.
  void truncate(size_t count);

  [[nodiscard]] size_t bytes() const;
  /// What bytes() will be for a graph of this shape that is not built yet.
  [[nodiscard]] static size_t estimate(size_t nodes, uint32_t width, uint32_t upper_width);

  void save(Writer& out) const;
  /// Reads a saved graph. Throws Error(corrupt) unless it has this shape and all links lead to rows of their level.
  static Graph load(Reader& in, size_t nodes, uint32_t width, uint32_t upper_width);

 private:
  static std::span<const uint32_t> filled(const uint32_t* slots, uint32_t width) {
    uint32_t n = 0;
    while (n < width && slots[n] != kNoLink) ++n;
    return {slots, n};
  }

  size_t nodes_ = 0;
  uint32_t width_ = 0;
  uint32_t upper_width_ = 0;
  cpu::ReservedBuffer
      links_;  // page-aligned: the 2M = 32 links of a default row are two cache lines
  std::vector<Tower> towers_;
  std::vector<uint32_t> upper_;
  uint32_t entry_row_ = 0;
  uint32_t entry_tower_ = kNoLink;
};

/// Adapts level 0 of a graph to Beam.
struct GraphLinks {
  const Graph* graph;
  std::span<const uint32_t> operator()(uint32_t row) const { return graph->links(row); }
  void prefetch(uint32_t row) const {
    const uint32_t* slots = graph->slots(row);
    for (uint32_t i = 0; i < graph->width(); i += 16) __builtin_prefetch(slots + i, 0, 2);
  }
};

/// What shows whether a graph can be searched at all.
struct GraphShape {
  double mean_degree;  ///< of level 0; twins, which have no links, do not count
  double max_degree;
  /// Share of all rows that can be reached from the entry along level 0. A twin counts as reached where its
  /// representative is.
  double reachable_share;
};
[[nodiscard]] GraphShape measure(const Graph& graph, const Twins& twins = {});
/// A warning of what searches of a graph of this shape will suffer from; empty: nothing.
[[nodiscard]] std::string warning_of(const GraphShape& shape);

/// Sets mark[row] = 1 for every row that level-0 links lead to from `start`; does not go on from rows already marked.
/// Returns how many rows were newly marked.
size_t mark_reachable(const Graph& graph, uint32_t start, std::vector<uint8_t>& mark);

}  // namespace keyhole::index
