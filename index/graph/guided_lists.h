// What the steps of a query-guided build share: the link lists that they read and replace, and threads with their
// memory.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/pool.h"
#include "index/graph/beam_search.h"
#include "index/graph/edge_pruner.h"
#include "index/graph/graph.h"

namespace keyhole::index {

/// (row that gets a link, row it leads to)
using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;

/// The working memory of one thread.
struct Worker {
  explicit Worker(const LiftedKeys& keys) : pruner(keys) {}
  EdgePruner pruner;
  Beam beam;
  std::vector<uint32_t> candidates;
  LiftedKeys::Query query;
};

/// The threads of a build, each with its memory; without a pool, the calling thread.
class Workers {
 public:
  Workers(cpu::Pool* pool, const LiftedKeys& keys) : pool_(pool) {
    workers_.assign(pool != nullptr ? pool->threads() : 1, Worker(keys));
  }
  /// Calls f(i, worker) for i in [0, n).
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

/// The lists of a graph that is being built.
class DirectLists {
 public:
  explicit DirectLists(Graph& graph) : graph_(&graph) {}
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

}  // namespace keyhole::index
