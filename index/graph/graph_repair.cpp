#include "index/graph/graph_repair.h"

#include <algorithm>
#include <array>
#include <utility>

#include "index/graph/beam_search.h"
#include "index/graph/edge_pruner.h"

namespace keyhole::index {
namespace {

constexpr size_t kAttachBeam = 64;
constexpr size_t kMostCandidates = 256;  // surviving rows considered per repaired list

// Surviving rows that dropped neighbours of `row` led to, through any number of dropped rows.
void survivors_behind(const Graph& graph, uint32_t row, size_t count, std::vector<uint32_t>& found,
                      std::vector<uint32_t>& open) {
  open.clear();
  for (const uint32_t next : graph.links(row)) {
    if (next >= count) open.push_back(next);
  }
  for (size_t i = 0; i < open.size() && found.size() < kMostCandidates; ++i) {
    for (const uint32_t next : graph.links(open[i])) {
      if (next == row) continue;
      if (next < count) {
        if (std::find(found.begin(), found.end(), next) == found.end()) found.push_back(next);
      } else if (open.size() < kMostCandidates &&
                 std::find(open.begin(), open.end(), next) == open.end()) {
        open.push_back(next);
      }
    }
  }
}

// Makes `row` reachable from the reachable row `from`, and nothing unreachable that was reachable.
void attach(Graph& graph, const LiftedKeys& keys, uint32_t from, uint32_t row) {
  uint32_t* slots = graph.slots(from);
  const size_t degree = graph.links(from).size();
  if (degree < graph.width()) {
    slots[degree] = row;
    return;
  }
  // No slot is free: put the row into the middle of the longest link, from -> row -> far.
  std::vector<float> scores(degree);
  LiftedKeys::Query query;
  keys.load(from, query);
  keys.similarity(query, slots, degree, scores.data());
  const size_t last =
      static_cast<size_t>(std::min_element(scores.begin(), scores.end()) - scores.begin());
  const uint32_t far = std::exchange(slots[last], row);
  const auto links = graph.links(row);
  if (std::find(links.begin(), links.end(), far) != links.end()) return;
  // Where the row's own list is full, the link that gives way leads to a row not reached by it yet; if it
  // becomes unreachable, its turn comes.
  graph.slots(row)[std::min<size_t>(links.size(), graph.width() - 1)] = far;
}

}  // namespace

void remove_rows(Graph& graph, const LiftedKeys& keys) {
  const size_t count = keys.rows().tokens;
  std::vector<uint32_t> candidates;
  std::vector<uint32_t> open;
  struct Repair {
    uint32_t row;
    std::vector<uint32_t> candidates;
  };
  std::vector<Repair> repairs;  // found on the old graph, applied to the new one
  for (uint32_t row = 0; row < count; ++row) {
    const auto links = graph.links(row);
    if (std::none_of(links.begin(), links.end(), [&](uint32_t l) { return l >= count; })) continue;
    candidates.clear();
    survivors_behind(graph, row, count, candidates, open);
    repairs.push_back({row, candidates});
  }
  graph.truncate(count);
  // Links that survive were chosen by the same rule and are kept. Half the slots, as HNSW does for a new row: the
  // rest is for links that come later.
  EdgePruner pruner(keys);
  for (const Repair& repair : repairs) {
    const auto links = graph.links(repair.row);
    candidates.assign(links.begin(), links.end());
    candidates.insert(candidates.end(), repair.candidates.begin(), repair.candidates.end());
    const size_t most = std::max<size_t>(graph.width() / 2, links.size());
    const auto chosen = pruner.prune(repair.row, candidates, links.size(), most, false);
    uint32_t* slots = graph.slots(repair.row);
    std::fill(std::copy(chosen.begin(), chosen.end(), slots), slots + graph.width(), kNoLink);
  }
}

void connect_all(Graph& graph, const LiftedKeys& keys, const Twins& twins) {
  const size_t nodes = graph.nodes();
  if (nodes == 0) return;
  std::vector<uint8_t> reached(nodes, 0);
  size_t total = twins.size() + mark_reachable(graph, graph.entry_row(), reached);
  if (total == nodes) return;
  const std::vector<uint32_t> representative = twins.representatives(nodes);
  Beam beam;
  beam.reserve(nodes, graph.width(), kAttachBeam);
  LiftedKeys::Query query;
  const auto score = [&](const uint32_t* ids, size_t n, float* out) {
    keys.similarity(query, ids, n, out);
  };
  for (uint32_t row = 0; row < nodes && total < nodes; ++row) {
    if (reached[row] != 0 || representative[row] != row) continue;
    keys.load(row, query);
    beam.search(std::array{graph.entry_row()}, kAttachBeam, GraphLinks{&graph}, score);
    // The nearest reachable row, but rather one with a free slot.
    uint32_t from = rank_row(beam.rank(0));
    for (size_t i = 0; i < beam.size(); ++i) {
      const uint32_t near = rank_row(beam.rank(i));
      if (graph.links(near).size() == graph.width()) continue;
      from = near;
      break;
    }
    attach(graph, keys, from, row);
    total += mark_reachable(graph, row, reached);
  }
}

bool take_out(const Twins& twins, Graph& graph) {
  if (twins.empty()) return false;
  const auto nodes = static_cast<uint32_t>(graph.nodes());
  const std::vector<uint32_t> representative = twins.representatives(nodes);
  const auto is_twin = [&](uint32_t row) { return representative[row] != row; };
  const auto towers = graph.towers();
  bool is_out = std::none_of(towers.begin(), towers.end(),
                             [&](const Graph::Tower& tower) { return is_twin(tower.row); });
  for (uint32_t row = 0; row < nodes && is_out; ++row) {
    const auto links = graph.links(row);
    is_out = (links.empty() || !is_twin(row)) && std::none_of(links.begin(), links.end(), is_twin);
  }
  if (is_out) return false;

  Graph out(nodes, graph.width(), graph.upper_width());
  for (uint32_t row = 0; row < nodes; ++row) {
    const uint32_t from = representative[row];
    for (const uint32_t link : graph.links(row)) {
      const uint32_t to = representative[link];
      const auto links = out.links(from);
      const bool is_there = to == from || std::find(links.begin(), links.end(), to) != links.end();
      if (!is_there && links.size() < out.width()) out.slots(from)[links.size()] = to;
    }
  }
  // Positions of towers are what links between towers name.
  std::vector<uint32_t> position(towers.size(), kNoLink);
  for (uint32_t t = 0; t < towers.size(); ++t) {
    if (is_twin(towers[t].row)) continue;
    position[t] = static_cast<uint32_t>(out.towers().size());
    out.add_tower(towers[t].row, towers[t].levels);
  }
  for (uint32_t t = 0; t < towers.size(); ++t) {
    for (uint32_t level = 1; position[t] != kNoLink && level <= towers[t].levels; ++level) {
      uint32_t* slot = out.upper_slots(position[t], level);
      for (const uint32_t link : graph.upper_links(t, level)) {
        if (position[link] != kNoLink) *slot++ = position[link];
      }
    }
  }
  out.choose_entry();
  graph = std::move(out);
  return true;
}

}  // namespace keyhole::index
