#include "index/guided_graph.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <unordered_map>

#include "index/accelerator.h"
#include "index/beam_search.h"
#include "index/edge_pruner.h"
#include "index/graph_repair.h"

namespace keyhole::index {
namespace {

// Rows or queries whose lists are computed from one state of the graph.
constexpr size_t kRound = 256;
constexpr size_t kBridgeRound = 64;  // smaller: what one query has linked, the next need not
constexpr size_t kAppendRound = 16;  // appended rows resemble each other: they should meet
constexpr size_t kPivotChoice = 20;  // of a query's neighbours, how many may be its pivot
constexpr size_t kEntries = 16;

// (row that gets a link, row it leads to)
using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;

// Memory of one worker.
struct Worker {
  explicit Worker(const LiftedKeys& keys) : pruner(keys) {}
  EdgePruner pruner;
  Beam beam;
  std::vector<uint32_t> candidates;
  float query[kMaxHeadDim] = {};
};

class Workers {
 public:
  Workers(cpu::Pool* pool, const LiftedKeys& keys) : pool_(pool) {
    workers_.assign(pool != nullptr ? pool->threads() : 1, Worker(keys));
  }
  template <class F>
  void for_each(size_t n, F&& f) {
    if (pool_ == nullptr) {
      for (size_t i = 0; i < n; ++i) f(i, workers_[0]);
      return;
    }
    pool_->run(static_cast<uint32_t>(n), [&](uint32_t i, uint32_t w) { f(i, workers_[w]); });
  }

 private:
  cpu::Pool* pool_;
  std::vector<Worker> workers_;
};

// ---- A graph that is being built, and edits beside a graph that must not change ---------------------------

class Direct {
 public:
  explicit Direct(Graph& graph) : graph_(&graph) {}
  [[nodiscard]] size_t nodes() const { return graph_->nodes(); }
  [[nodiscard]] uint32_t width() const { return graph_->width(); }
  [[nodiscard]] std::span<const uint32_t> operator()(uint32_t row) const {
    return graph_->links(row);
  }
  void prefetch(uint32_t row) const { GraphLinks{graph_}.prefetch(row); }
  void set(uint32_t row, std::span<const uint32_t> links) {
    uint32_t* slots = graph_->slots(row);
    std::copy(links.begin(), links.end(), slots);
    std::fill(slots + links.size(), slots + width(), kNoLink);
  }

 private:
  Graph* graph_;
};

class Beside {
 public:
  Beside(const Graph& graph, size_t nodes) : graph_(&graph), nodes_(nodes) {}
  [[nodiscard]] size_t nodes() const { return nodes_; }
  [[nodiscard]] uint32_t width() const { return graph_->width(); }
  [[nodiscard]] std::span<const uint32_t> operator()(uint32_t row) const {
    const auto at = edits_.find(row);
    if (at != edits_.end()) return at->second;
    if (row >= graph_->nodes()) return {};
    return graph_->links(row);
  }
  void prefetch(uint32_t row) const {
    if (row < graph_->nodes()) GraphLinks{graph_}.prefetch(row);
  }
  void set(uint32_t row, std::span<const uint32_t> links) {
    edits_[row].assign(links.begin(), links.end());
  }
  [[nodiscard]] GraphEdits edits() const {
    GraphEdits out;
    out.nodes = nodes_;
    for (const auto& [row, links] : edits_) out.rows.push_back(row);
    std::sort(out.rows.begin(), out.rows.end());
    out.slots.assign(out.rows.size() * width(), kNoLink);
    for (size_t i = 0; i < out.rows.size(); ++i) {
      const auto& links = edits_.at(out.rows[i]);
      std::copy(links.begin(), links.end(),
                out.slots.begin() + static_cast<std::ptrdiff_t>(i * width()));
    }
    return out;
  }

 private:
  const Graph* graph_;
  size_t nodes_;
  std::unordered_map<uint32_t, std::vector<uint32_t>> edits_;
};

// ---- Links back ------------------------------------------------------------------------------------------

// Adds a link for every pair; a list that overflows `most` is pruned. The rows that get links are divided
// over the workers, each list is touched by one of them.
template <class Lists>
void link_back(Lists& lists, Pairs& pairs, size_t most, bool fill, Workers& workers) {
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  std::vector<size_t> starts;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (i == 0 || pairs[i].first != pairs[i - 1].first) starts.push_back(i);
  }
  std::vector<std::vector<uint32_t>> updated(starts.size());
  workers.for_each(starts.size(), [&](size_t s, Worker& worker) {
    const size_t end = s + 1 < starts.size() ? starts[s + 1] : pairs.size();
    const uint32_t row = pairs[starts[s]].first;
    const auto links = lists(row);
    auto& candidates = worker.candidates;
    candidates.assign(links.begin(), links.end());
    for (size_t i = starts[s]; i < end; ++i) {
      const uint32_t target = pairs[i].second;
      if (std::find(links.begin(), links.end(), target) == links.end()) {
        candidates.push_back(target);
      }
    }
    if (candidates.size() <= most) {
      updated[s] = candidates;
    } else {
      const auto chosen = worker.pruner.prune(row, candidates, 0, most, fill);
      updated[s].assign(chosen.begin(), chosen.end());
    }
  });
  for (size_t s = 0; s < starts.size(); ++s) lists.set(pairs[starts[s]].first, updated[s]);
}

// ---- Project ---------------------------------------------------------------------------------------------

// The pivot of each query of the round: the first of its best keys that has room and is not another's pivot
// in this round; else its best.
void choose_pivots(const Direct& lists, const Neighbours& neighbours, size_t first, size_t end,
                   uint32_t m, std::vector<uint32_t>& pivots) {
  pivots.clear();
  for (size_t q = first; q < end; ++q) {
    const auto near = neighbours.of(q);
    if (near.size() < 2) {
      pivots.push_back(kNoLink);  // nothing to link
      continue;
    }
    uint32_t pivot = near[0];
    for (const uint32_t key : near.subspan(0, std::min(near.size(), kPivotChoice))) {
      if (lists(key).size() >= m) continue;
      if (std::find(pivots.begin(), pivots.end(), key) != pivots.end()) continue;
      pivot = key;
      break;
    }
    pivots.push_back(pivot);
  }
}

void project(Direct& lists, const Neighbours& neighbours, uint32_t m, Workers& workers,
             std::vector<uint8_t>& is_pivot, ProgressMeter& meter) {
  std::vector<uint32_t> pivots;
  Pairs pairs;
  for (size_t first = 0; first < neighbours.queries(); first += kRound) {
    const size_t end = std::min(first + kRound, neighbours.queries());
    choose_pivots(lists, neighbours, first, end, m, pivots);
    std::vector<std::vector<uint32_t>> chosen(end - first);
    workers.for_each(end - first, [&](size_t i, Worker& worker) {
      if (pivots[i] == kNoLink) return;
      const auto links = lists(pivots[i]);
      const auto near = neighbours.of(first + i);
      auto& candidates = worker.candidates;
      candidates.assign(links.begin(), links.end());
      candidates.insert(candidates.end(), near.begin(), near.end());
      const auto list = worker.pruner.prune(pivots[i], candidates, 0, m, true);
      chosen[i].assign(list.begin(), list.end());
    });
    pairs.clear();
    for (size_t i = 0; i < chosen.size(); ++i) {
      if (pivots[i] == kNoLink) continue;
      is_pivot[pivots[i]] = 1;
      lists.set(pivots[i], chosen[i]);
      for (const uint32_t key : chosen[i]) pairs.emplace_back(key, pivots[i]);
    }
    link_back(lists, pairs, m, true, workers);
    meter.advance(static_cast<double>(end - first));
  }
}

// ---- Connect ---------------------------------------------------------------------------------------------

// Links each of the rows to its `nearest` keys, or, without those, to what a search finds near it, and back.
template <class Lists>
void connect_round(Lists& lists, const LiftedKeys& keys, std::span<const uint32_t> entries,
                   std::span<const uint32_t> rows, const GuidedConfig& config,
                   const Neighbours& nearest, Workers& workers) {
  std::vector<std::vector<uint32_t>> chosen(rows.size());
  std::vector<size_t> old(rows.size());
  workers.for_each(rows.size(), [&](size_t i, Worker& worker) {
    const uint32_t row = rows[i];
    const auto links = lists(row);
    old[i] = links.size();
    auto& candidates = worker.candidates;
    candidates.assign(links.begin(), links.end());
    const auto add = [&](uint32_t near) {
      if (near != row && std::find(links.begin(), links.end(), near) == links.end()) {
        candidates.push_back(near);
      }
    };
    if (nearest.per_query != 0) {
      for (const uint32_t near : nearest.of(row)) add(near);
    } else {
      const float extra = keys.load(row, worker.query);
      worker.beam.reserve(lists.nodes(), std::max<size_t>(lists.width(), entries.size()),
                          config.beam);
      worker.beam.search(entries, config.beam, lists,
                         [&](const uint32_t* ids, size_t n, float* out) {
                           keys.similarity(worker.query, extra, ids, n, out);
                         });
      for (size_t c = 0; c < worker.beam.size(); ++c) add(rank_row(worker.beam.rank(c)));
    }
    const size_t most = std::min<size_t>(2 * config.m, links.size() + config.m);
    const auto list = worker.pruner.prune(row, candidates, links.size(), most, false);
    chosen[i].assign(list.begin(), list.end());
  });
  Pairs pairs;
  for (size_t i = 0; i < rows.size(); ++i) {
    lists.set(rows[i], chosen[i]);
    for (size_t l = old[i]; l < chosen[i].size(); ++l) pairs.emplace_back(chosen[i][l], rows[i]);
  }
  link_back(lists, pairs, 2 * config.m, false, workers);
}

// Keys near to every key, in the lifted geometry, if the accelerator finds them; else none. Of `most` nearest ones it
// returns those that the occlusion rule leaves, some eight: links that a key has already may hide more of them.
// Measured on a 32k trace: the graph of the thinned lists finds as much per key scored as that of the whole ones.
Neighbours nearest_of_all(const Context& context, const LiftedKeys& keys,
                          const GuidedConfig& config) {
  Neighbours found;
  const size_t n = keys.rows().count;
  if (context.accelerator == nullptr || n < 2) return found;
  NearestTask task;
  task.keys = task.queries = keys.rows();
  task.key_extra = task.query_extra = keys.extra().data();
  task.most = static_cast<uint32_t>(std::min<size_t>(config.beam, n));
  task.thin = std::min(2 * config.m, task.most);
  found.counts.resize(n);
  found.rows.resize(n * task.thin);
  const NearestLists lists{found.rows.data(), found.counts.data()};
  if (!context.accelerator->nearest_keys(task, lists)) return {};
  found.per_query = task.thin;
  return found;
}

// ---- Bridge ----------------------------------------------------------------------------------------------

// The pieces into which a query's nearest keys fall along the links between them.
class Pieces {
 public:
  template <class Lists>
  void find(const Lists& lists, std::span<const uint32_t> rows) {
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
template <class Lists>
Pairs missing_links(const Lists& lists, const LiftedKeys& keys, std::span<const uint32_t> rows,
                    Worker& worker) {
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
    const float extra = keys.load(rows[r], worker.query);
    keys.similarity(worker.query, extra, joined.data(), joined.size(), scores.data());
    const auto end = scores.begin() + static_cast<std::ptrdiff_t>(joined.size());
    const auto nearest =
        static_cast<size_t>(std::max_element(scores.begin(), end) - scores.begin());
    links.emplace_back(rows[r], joined[nearest]);
    links.emplace_back(joined[nearest], rows[r]);
    pieces.join(r, 0);
  }
  return links;
}

void bridge(Direct& lists, const LiftedKeys& keys, const Neighbours& neighbours, Workers& workers) {
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

// A fixed order in which neighbours in the text, which are often alike, do not share a round.
std::vector<uint32_t> scattered(size_t n) {
  std::vector<uint64_t> order(n);
  for (size_t i = 0; i < n; ++i) {
    order[i] = ((i * 0x9E3779B97F4A7C15ULL) & 0xFFFFFFFF00000000ULL) | i;
  }
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> rows(n);
  for (size_t i = 0; i < n; ++i) rows[i] = static_cast<uint32_t>(order[i]);
  return rows;
}

// The most wanted keys: how often a key is among the neighbours of a query, best ranks counting most.
std::vector<uint32_t> most_wanted(const Neighbours& neighbours, size_t rows, size_t& hit) {
  std::vector<float> wanted(rows, 0.0F);
  for (size_t q = 0; q < neighbours.queries(); ++q) {
    const auto near = neighbours.of(q);
    for (size_t i = 0; i < near.size(); ++i) wanted[near[i]] += 1.0F / static_cast<float>(8 + i);
  }
  std::vector<uint64_t> order;
  for (uint32_t row = 0; row < rows; ++row) {
    if (wanted[row] > 0.0F) order.push_back(pack_rank(wanted[row], row));
  }
  hit = order.size();
  const size_t n = std::min(kEntries, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(),
                    std::greater<>());
  std::vector<uint32_t> entries;
  for (size_t i = 0; i < n; ++i) entries.push_back(rank_row(order[i]));
  return entries;
}

}  // namespace

GuidedGraph build_guided(const Context& context, const LiftedKeys& keys,
                         const Neighbours& neighbours, const GuidedConfig& config,
                         ProgressMeter& meter) {
  const size_t n = keys.rows().count;
  GuidedGraph out;
  out.graph = Graph(n, config.width(), 0, 2 * n);
  Guidance& guidance = out.guidance;
  guidance.queries = neighbours.queries();
  if (n == 0) return out;
  Direct lists(out.graph);
  Workers workers(context.pool, keys);
  guidance.entries = most_wanted(neighbours, n, guidance.hit);
  std::vector<uint8_t> is_pivot(n, 0);
  project(lists, neighbours, config.m, workers, is_pivot, meter);
  guidance.pivots = static_cast<size_t>(std::count(is_pivot.begin(), is_pivot.end(), 1));

  const std::vector<uint32_t> rows = scattered(n);
  if (guidance.entries.empty()) guidance.entries.push_back(rows[0]);
  out.graph.set_entry(guidance.entries[0]);
  const Neighbours nearest = nearest_of_all(context, keys, config);
  // Searches find few rows in the graph at first where no query guided it: rounds grow with it.
  size_t in_graph = std::max<size_t>(guidance.hit, 1);
  for (size_t first = 0; first < n;) {
    const size_t round = std::min({kRound, std::max<size_t>(in_graph / 4, 1), n - first});
    connect_round(lists, keys, guidance.entries, std::span(rows).subspan(first, round), config,
                  nearest, workers);
    first += round;
    in_graph += round;
    meter.advance(static_cast<double>(round));
  }
  bridge(lists, keys, neighbours, workers);
  LiftedKeys own = keys;  // repair is sequential and aims
  connect_all(out.graph, own);
  return out;
}

GraphEdits connect_rows(const Graph& graph, const LiftedKeys& keys,
                        std::span<const uint32_t> entries, const GuidedConfig& config,
                        ProgressMeter& meter) {
  const size_t n = keys.rows().count;
  Beside lists(graph, n);
  Workers workers(nullptr, keys);
  std::vector<uint32_t> rows;
  for (size_t first = graph.nodes(); first < n; first += rows.size()) {
    rows.resize(std::min(kAppendRound, n - first));
    std::iota(rows.begin(), rows.end(), static_cast<uint32_t>(first));
    connect_round(lists, keys, entries, rows, config, {}, workers);
    meter.advance(static_cast<double>(rows.size()));
  }
  // A new row whose every link back was pruned away takes the last slot of its nearest neighbour, whose
  // former link it takes over: nothing becomes unreachable.
  std::vector<uint8_t> led_to(n - graph.nodes(), 0);
  GraphEdits edits = lists.edits();
  for (const uint32_t target : edits.slots) {
    if (target != kNoLink && target >= graph.nodes()) led_to[target - graph.nodes()] = 1;
  }
  for (size_t i = 0; i < led_to.size(); ++i) {
    const auto row = static_cast<uint32_t>(graph.nodes() + i);
    const auto own = lists(row);
    if (led_to[i] != 0 || own.empty()) continue;
    std::vector<uint32_t> list(own.begin(), own.end());
    const uint32_t near = list[0];
    const auto links = lists(near);
    std::vector<uint32_t> changed(links.begin(), links.end());
    if (changed.size() < lists.width()) {
      changed.push_back(row);
    } else {
      const uint32_t given = std::exchange(changed.back(), row);
      if (std::find(list.begin(), list.end(), given) == list.end()) {
        if (list.size() == lists.width()) list.pop_back();
        list.push_back(given);
      }
    }
    lists.set(near, changed);
    lists.set(row, list);
  }
  return lists.edits();
}

void apply(const GraphEdits& edits, Graph& graph) {
  graph.resize(edits.nodes);
  for (size_t i = 0; i < edits.rows.size(); ++i) {
    std::copy_n(edits.slots.data() + i * graph.width(), graph.width(), graph.slots(edits.rows[i]));
  }
}

}  // namespace keyhole::index
