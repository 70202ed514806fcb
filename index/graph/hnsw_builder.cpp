#include "index/graph/hnsw_builder.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "index/graph/beam_search.h"
#include "index/graph/edge_pruner.h"

namespace keyhole::index {
namespace {

constexpr size_t kMeterRows = 64;  // inserted between two questions whether to go on

// Geometric levels, P(level >= l) = m^-l, from the row number alone (splitmix64 as the hash).
uint32_t level_of(uint32_t row, uint32_t m) {
  uint64_t x = row + 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  const double uniform = (static_cast<double>(x >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
  return static_cast<uint32_t>(-std::log(uniform) / std::log(static_cast<double>(m)));
}

// One level of a graph. Its nodes are rows on level 0 and towers above.
class Level {
 public:
  Level(Graph& graph, uint32_t level) : graph_(&graph), level_(level) {}

  [[nodiscard]] uint32_t width() const {
    return level_ == 0 ? graph_->width() : graph_->upper_width();
  }
  [[nodiscard]] uint32_t row(uint32_t node) const {
    return level_ == 0 ? node : graph_->towers()[node].row;
  }
  [[nodiscard]] uint32_t node(uint32_t row) const {
    if (level_ == 0) return row;
    const auto towers = graph_->towers();
    const auto at = std::partition_point(towers.begin(), towers.end(),
                                         [&](const Graph::Tower& t) { return t.row < row; });
    return static_cast<uint32_t>(at - towers.begin());
  }
  [[nodiscard]] std::span<const uint32_t> operator()(uint32_t node) const {
    return level_ == 0 ? graph_->links(node) : graph_->upper_links(node, level_);
  }
  void prefetch(uint32_t node) const { index::prefetch(slots(node), width() * sizeof(uint32_t)); }
  void set(uint32_t node, std::span<const uint32_t> rows) const {
    uint32_t* list = slots(node);
    uint32_t* end =
        std::transform(rows.begin(), rows.end(), list, [&](uint32_t r) { return this->node(r); });
    std::fill(end, list + width(), kNoLink);
  }
  void add(uint32_t node, uint32_t target) const { slots(node)[(*this)(node).size()] = target; }

 private:
  [[nodiscard]] uint32_t* slots(uint32_t node) const {
    return level_ == 0 ? graph_->slots(node) : graph_->upper_slots(node, level_);
  }

  Graph* graph_;
  uint32_t level_;
};

class Builder {
 public:
  Builder(const Graph& graph, const LiftedKeys& keys, const HnswConfig& config)
      : keys_(keys),
        config_(config),
        graph_(extended(graph, keys.rows().tokens)),
        pruner_(keys, Ties::larger_row) {
    beam_.reserve(graph_.nodes(), graph_.width(), config.ef_construction);
    rows_.resize(graph_.width());
  }

  void insert(uint32_t row);
  [[nodiscard]] Graph take() { return std::move(graph_); }

 private:
  static Graph extended(const Graph& graph, size_t rows);
  void search(const Level& level, uint32_t start, size_t ef);
  void connect(const Level& level, uint32_t node);
  void link_back(const Level& level, uint32_t node, uint32_t target);

  const LiftedKeys& keys_;
  HnswConfig config_;
  Graph graph_;
  EdgePruner pruner_;
  Beam beam_;
  LiftedKeys::Query query_;     // the row that is being inserted
  std::vector<uint32_t> rows_;  // of towers that are scored
  std::vector<uint32_t> candidates_;
  std::vector<uint32_t> chosen_;
};

// The graph with empty lists for as many rows as there will be.
Graph Builder::extended(const Graph& graph, size_t rows) {
  Graph out(rows, graph.width(), graph.upper_width());
  for (uint32_t row = 0; row < graph.nodes(); ++row) {
    std::copy_n(graph.slots(row), graph.width(), out.slots(row));
  }
  for (const Graph::Tower& tower : graph.towers()) out.add_tower(tower.row, tower.levels);
  for (uint32_t t = 0; t < graph.towers().size(); ++t) {
    for (uint32_t level = 1; level <= graph.towers()[t].levels; ++level) {
      std::copy_n(graph.upper_slots(t, level), graph.upper_width(), out.upper_slots(t, level));
    }
  }
  out.choose_entry();
  return out;
}

void Builder::search(const Level& level, uint32_t start, size_t ef) {
  beam_.search(std::array{start}, ef, level, [&](const uint32_t* nodes, size_t n, float* out) {
    std::transform(nodes, nodes + n, rows_.begin(), [&](uint32_t node) { return level.row(node); });
    keys_.similarity(query_, rows_.data(), n, out);
  });
}

// Links the node to the best of the rows that the beam holds, and those to it.
void Builder::connect(const Level& level, uint32_t node) {
  candidates_.clear();
  for (size_t i = 0; i < beam_.size(); ++i) {
    candidates_.push_back(level.row(rank_row(beam_.rank(i))));
  }
  if (candidates_.size() < config_.m) {  // too few for any to be in another's place
    chosen_ = candidates_;
  } else {
    const auto best = pruner_.prune(level.row(node), candidates_, 0, config_.m, false);
    chosen_.assign(best.begin(), best.end());
  }
  level.set(node, chosen_);
  for (const uint32_t row : chosen_) link_back(level, level.node(row), node);
}

void Builder::link_back(const Level& level, uint32_t node, uint32_t target) {
  const auto links = level(node);
  if (links.size() < level.width()) return level.add(node, target);
  candidates_.clear();
  for (const uint32_t link : links) candidates_.push_back(level.row(link));
  candidates_.push_back(level.row(target));
  level.set(node, pruner_.prune(level.row(node), candidates_, 0, level.width(), false));
}

void Builder::insert(uint32_t row) {
  const uint32_t levels = level_of(row, config_.m);
  const uint32_t entry_tower = graph_.entry_tower();
  const uint32_t top = entry_tower == kNoLink ? 0 : graph_.towers()[entry_tower].levels;
  const auto tower = static_cast<uint32_t>(graph_.towers().size());
  if (levels > 0) graph_.add_tower(row, levels);
  if (row > 0) {
    keys_.load(row, query_);
    uint32_t nearest = graph_.entry_row();
    for (uint32_t l = top + 1; l-- > 0;) {
      const Level level(graph_, l);
      const bool links = l <= levels;
      search(level, level.node(nearest), links ? config_.ef_construction : 1);
      nearest = level.row(rank_row(beam_.rank(0)));
      if (links) connect(level, l == 0 ? row : tower);
    }
  }
  if (levels > top) graph_.choose_entry();
}

}  // namespace

Graph insert_rows(const Graph& graph, const LiftedKeys& keys, const HnswConfig& config,
                  ProgressMeter& meter, const Twins& twins) {
  const size_t count = keys.rows().tokens;
  const std::vector<uint32_t> representative = twins.representatives(count);
  Builder builder(graph, keys, config);
  for (size_t row = graph.nodes(); row < count; ++row) {
    if (row % kMeterRows == 0) {
      meter.advance(static_cast<double>(std::min(kMeterRows, count - row)));
    }
    if (representative[row] == row) builder.insert(static_cast<uint32_t>(row));
  }
  return builder.take();
}

}  // namespace keyhole::index
