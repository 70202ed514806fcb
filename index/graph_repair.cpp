#include "index/graph_repair.h"

#include <algorithm>
#include <array>
#include <functional>

#include "index/beam_search.h"

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

// HNSW's choice among candidates: nearest first, dropping whoever is nearer to one already chosen than to
// the row itself. Surviving links have passed this test before and are kept.
void choose_links(Graph& graph, LiftedKeys& keys, uint32_t row, std::vector<uint32_t> kept,
                  const std::vector<uint32_t>& candidates) {
  std::vector<float> scores(candidates.size());
  keys.aim(row);
  keys.similarity(candidates.data(), candidates.size(), scores.data());
  std::vector<uint64_t> order;
  for (size_t i = 0; i < candidates.size(); ++i)
    order.push_back(pack_rank(scores[i], candidates[i]));
  std::sort(order.begin(), order.end(), std::greater<>());
  // Half the slots, as HNSW does for a new row: the rest is for links that come later.
  const size_t most = std::max<size_t>(graph.width() / 2, kept.size());
  std::vector<float> to_kept(graph.width());
  for (const uint64_t rank : order) {
    if (kept.size() >= most) break;
    const uint32_t candidate = rank_row(rank);
    if (std::find(kept.begin(), kept.end(), candidate) != kept.end()) continue;
    keys.aim(candidate);
    keys.similarity(kept.data(), kept.size(), to_kept.data());
    const float to_row = rank_score(rank);
    const bool occluded = std::any_of(to_kept.begin(), to_kept.begin() + kept.size(),
                                      [&](float s) { return s > to_row; });
    if (!occluded) kept.push_back(candidate);
  }
  uint32_t* slots = graph.slots(row);
  std::copy(kept.begin(), kept.end(), slots);
  std::fill(slots + kept.size(), slots + graph.width(), kNoLink);
}

// Makes `row` reachable from the reachable row `from`, and nothing unreachable that was reachable.
void attach(Graph& graph, LiftedKeys& keys, uint32_t from, uint32_t row) {
  uint32_t* slots = graph.slots(from);
  const size_t degree = graph.links(from).size();
  if (degree < graph.width()) {
    slots[degree] = row;
    return;
  }
  // No slot is free: put the row into the middle of the longest link, from -> row -> far.
  std::vector<float> scores(degree);
  keys.aim(from);
  keys.similarity(slots, degree, scores.data());
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

void remove_rows(Graph& graph, LiftedKeys& keys) {
  const size_t count = keys.rows().count;
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
  for (const Repair& repair : repairs) {
    const auto links = graph.links(repair.row);
    choose_links(graph, keys, repair.row, {links.begin(), links.end()}, repair.candidates);
  }
}

void connect_all(Graph& graph, LiftedKeys& keys) {
  const size_t nodes = graph.nodes();
  if (nodes == 0) return;
  std::vector<uint8_t> reached(nodes, 0);
  size_t total = mark_reachable(graph, graph.entry_row(), reached);
  if (total == nodes) return;
  Beam beam;
  beam.reserve(nodes, graph.width(), kAttachBeam);
  const auto score = [&](const uint32_t* ids, size_t n, float* out) {
    keys.similarity(ids, n, out);
  };
  for (uint32_t row = 0; row < nodes && total < nodes; ++row) {
    if (reached[row] != 0) continue;
    keys.aim(row);
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

}  // namespace keyhole::index
