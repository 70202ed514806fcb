#include "index/graph/guided_graph.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

#include "index/accelerator.h"
#include "index/graph/bridges.h"
#include "index/graph/graph_repair.h"
#include "index/graph/guided_lists.h"

namespace keyhole::index {
namespace {

// Rows or queries whose lists are computed from one state of the graph.
constexpr size_t kRound = 256;
constexpr size_t kAppendRound = 16;  // appended rows resemble each other: they should meet
constexpr size_t kPivotChoice = 20;  // of a query's neighbours, how many may be its pivot
constexpr size_t kEntries = 16;

// ---- Lists of a graph that must not change, and new ones beside them ---------------------------------------

class ListsBeside {
 public:
  ListsBeside(const Graph& graph, size_t nodes) : graph_(&graph), nodes_(nodes) {}
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

// Adds a link for every pair; a list of more than `most` is pruned. The rows that get links are divided
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

// The pivot of each query of the round: the first of its best keys whose list is not full and that is not another's
// pivot in this round; else its best.
void choose_pivots(const DirectLists& lists, const Neighbours& neighbours, size_t first, size_t end,
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

void project(DirectLists& lists, const Neighbours& neighbours, uint32_t m, Workers& workers,
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
      keys.load(row, worker.query);
      worker.beam.reserve(lists.nodes(), std::max<size_t>(lists.width(), entries.size()),
                          config.beam);
      worker.beam.search(entries, config.beam, lists,
                         [&](const uint32_t* ids, size_t n, float* out) {
                           keys.similarity(worker.query, ids, n, out);
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

// Keys near to every key that is no twin, in the lifted geometry, if the accelerator finds them; else none. Of `most`
// nearest ones it returns those that the occlusion rule leaves, some eight: links that a key has already may hide more
// of them.
// Measured on a 32k trace: the graph of the thinned lists finds as much per key scored as that of the whole ones.
Neighbours nearest_of_all(const Context& context, const LiftedKeys& keys,
                          const GuidedConfig& config, const Twins& twins) {
  Neighbours found;
  const size_t n = keys.rows().tokens - twins.size();
  if (context.accelerator == nullptr || n < 2) return found;
  NearestTask task;
  const std::vector<uint32_t> distinct = twins.distinct(keys.rows().tokens);
  // A tenth of a second for 128k keys, a twentieth of what the search saves.
  const std::vector<std::byte> rows = keys.copy(distinct);
  std::vector<float> extra = keys.extra();
  for (size_t i = 0; i < distinct.size(); ++i) extra[i] = extra[distinct[i]];
  task.keys = dense_rows(rows.data(), n, keys.rows().dim, keys.copy_dtype());
  task.queries = task.keys;
  task.key_extra = task.query_extra = extra.data();
  task.most = static_cast<uint32_t>(std::min<size_t>(config.beam, n));
  task.thin = std::min(2 * config.m, task.most);
  found.counts.resize(n);
  found.rows.resize(n * task.thin);
  const NearestLists lists{found.rows.data(), found.counts.data()};
  if (!context.accelerator->nearest_keys(task, lists)) return {};
  found.per_query = task.thin;
  if (distinct.empty()) return found;
  // What was found are places among the distinct keys.
  Neighbours of_rows{task.thin, std::vector<uint32_t>(keys.rows().tokens),
                     std::vector<uint32_t>(keys.rows().tokens * task.thin)};
  for (size_t i = 0; i < n; ++i) {
    of_rows.counts[distinct[i]] = found.counts[i];
    const auto near = found.of(i);
    std::transform(
        near.begin(), near.end(),
        of_rows.rows.begin() + static_cast<std::ptrdiff_t>(distinct[i] * size_t{task.thin}),
        [&](uint32_t place) { return distinct[place]; });
  }
  return of_rows;
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
                         ProgressMeter& meter, const Twins& twins) {
  const size_t n = keys.rows().tokens;
  GuidedGraph out;
  out.graph = Graph(n, config.width(), 0, 2 * n);
  Guidance& guidance = out.guidance;
  guidance.queries = neighbours.queries();
  if (n == 0) return out;
  DirectLists lists(out.graph);
  Workers workers(context.pool, keys);
  guidance.entries = most_wanted(neighbours, n, guidance.hit);
  std::vector<uint8_t> is_pivot(n, 0);
  project(lists, neighbours, config.m, workers, is_pivot, meter);
  guidance.pivots = static_cast<size_t>(std::count(is_pivot.begin(), is_pivot.end(), 1));

  std::vector<uint32_t> rows = scattered(n);
  const std::vector<uint32_t> representative = twins.representatives(n);
  std::erase_if(rows, [&](uint32_t row) { return representative[row] != row; });
  meter.advance(static_cast<double>(twins.size()));
  if (guidance.entries.empty()) guidance.entries.push_back(rows[0]);
  out.graph.set_entry(guidance.entries[0]);
  const Neighbours nearest = nearest_of_all(context, keys, config, twins);
  // Searches find few rows in the graph at first where no query guided it: rounds grow with it.
  size_t in_graph = std::max<size_t>(guidance.hit, 1);
  for (size_t first = 0; first < rows.size();) {
    const size_t round = std::min({kRound, std::max<size_t>(in_graph / 4, 1), rows.size() - first});
    connect_round(lists, keys, guidance.entries, std::span(rows).subspan(first, round), config,
                  nearest, workers);
    first += round;
    in_graph += round;
    meter.advance(static_cast<double>(round));
  }
  add_bridges(lists, keys, neighbours, workers);
  connect_all(out.graph, keys, twins);
  return out;
}

GraphEdits connect_rows(const Graph& graph, const LiftedKeys& keys,
                        std::span<const uint32_t> entries, const GuidedConfig& config,
                        ProgressMeter& meter, const Twins& twins) {
  const size_t n = keys.rows().tokens;
  ListsBeside lists(graph, n);
  Workers workers(nullptr, keys);
  const std::vector<uint32_t> representative = twins.representatives(n);
  std::vector<uint32_t> rows;
  double passed = 0.0;
  for (auto row = static_cast<uint32_t>(graph.nodes()); row < n; ++row) {
    passed += 1.0;
    if (representative[row] == row) rows.push_back(row);
    if (rows.size() < kAppendRound && row + size_t{1} < n) continue;
    connect_round(lists, keys, entries, rows, config, {}, workers);
    meter.advance(std::exchange(passed, 0.0));
    rows.clear();
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
