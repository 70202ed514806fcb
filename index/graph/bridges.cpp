#include "index/graph/bridges.h"

#include <algorithm>
#include <numeric>

namespace keyhole::index {
namespace {

// Number of queries whose links are computed from one state of the graph. It is small, because links that one query
// adds are often those that the next would need.
constexpr size_t kBridgeRound = 64;

// The pieces into which a query's nearest keys fall along the links between them.
class Pieces {
 public:
  void find(const DirectLists& lists, std::span<const uint32_t> rows) {
    const auto n = static_cast<uint32_t>(rows.size());
    place_.resize(n);
    for (uint32_t r = 0; r < n; ++r) place_[r] = {rows[r], r};
    std::sort(place_.begin(), place_.end());
    parent_.resize(n);
    std::iota(parent_.begin(), parent_.end(), 0U);
    for (uint32_t r = 0; r < n; ++r) {
      for (const uint32_t next : lists(rows[r])) {
        const auto at = std::lower_bound(place_.begin(), place_.end(), std::pair(next, 0U));
        if (at != place_.end() && at->first == next) join(r, at->second);
      }
    }
  }
  [[nodiscard]] uint32_t root(uint32_t r) {
    while (parent_[r] != r) r = parent_[r] = parent_[parent_[r]];
    return r;
  }
  void join(uint32_t a, uint32_t b) {
    a = root(a);
    b = root(b);
    parent_[std::max(a, b)] = std::min(a, b);  // the piece of the best key keeps the name 0
  }

 private:
  std::vector<std::pair<uint32_t, uint32_t>> place_;  // (row, rank), by row
  std::vector<uint32_t> parent_;
};

// The links, both ways, that make the rows one piece: the best key of each piece and its nearest in the piece
// of the best key of all.
Pairs missing_links(const DirectLists& lists, const LiftedKeys& keys,
                    std::span<const uint32_t> rows, Worker& worker) {
  Pieces pieces;
  pieces.find(lists, rows);
  Pairs links;
  std::vector<float> scores(rows.size());
  auto& joined = worker.candidates;
  for (uint32_t r = 1; r < rows.size(); ++r) {
    if (pieces.root(r) == 0) continue;
    joined.clear();
    for (uint32_t j = 0; j < rows.size(); ++j) {
      if (pieces.root(j) == 0) joined.push_back(rows[j]);
    }
    keys.load(rows[r], worker.query);
    keys.similarity(worker.query, joined.data(), joined.size(), scores.data());
    const auto end = scores.begin() + static_cast<std::ptrdiff_t>(joined.size());
    const auto nearest =
        static_cast<size_t>(std::max_element(scores.begin(), end) - scores.begin());
    links.emplace_back(rows[r], joined[nearest]);
    links.emplace_back(joined[nearest], rows[r]);
    pieces.join(r, 0);
  }
  return links;
}

}  // namespace

void add_bridges(DirectLists& lists, const LiftedKeys& keys, const Neighbours& neighbours,
                 Workers& workers) {
  for (size_t first = 0; first < neighbours.queries(); first += kBridgeRound) {
    const size_t end = std::min(first + kBridgeRound, neighbours.queries());
    std::vector<Pairs> found(end - first);
    workers.for_each(end - first, [&](size_t i, Worker& worker) {
      found[i] = missing_links(lists, keys, neighbours.of(first + i), worker);
    });
    std::vector<uint32_t> list;
    for (const Pairs& pairs : found) {
      for (const auto& [from, to] : pairs) {
        const auto links = lists(from);
        if (links.size() == lists.width()) continue;
        if (std::find(links.begin(), links.end(), to) != links.end()) continue;
        list.assign(links.begin(), links.end());
        list.push_back(to);
        lists.set(from, list);
      }
    }
  }
}

}  // namespace keyhole::index
