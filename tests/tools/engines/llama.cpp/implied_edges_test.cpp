// Which edges of a graph can be left out, beside what can be reached with them and without.
#include "tools/engines/llama.cpp/implied_edges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

TEST(LlamaCppImpliedEdges, AreThoseOfTwoStreamsThatTakeTurns) {
  // The one stream's kernels are a, d, g; the other's b and c, e and f. Each stream follows its own last kernel, too.
  const std::array<char, 7> n{};
  const auto edge = [&](size_t from, size_t to) { return Edge{&n.at(from), &n.at(to)}; };
  const std::vector<Edge> edges{edge(0, 1), edge(1, 2), edge(2, 3), edge(0, 3), edge(3, 4),
                                edge(2, 4), edge(4, 5), edge(5, 6), edge(3, 6)};
  EXPECT_EQ(implied_edges(edges), (std::vector<size_t>{3, 5, 8}));
}

TEST(LlamaCppImpliedEdges, LeaveNothingOutThatWasReachable) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  constexpr size_t kNodes = 24;
  const std::array<char, kNodes> nodes{};
  using Reach = std::array<std::array<bool, kNodes>, kNodes>;
  for (int round = 0; round < 50; ++round) {
    std::set<std::pair<size_t, size_t>> pairs;
    for (int i = 0; i < 60; ++i) {
      const size_t a = random() % kNodes;
      const size_t b = random() % kNodes;
      if (a != b) pairs.emplace(std::min(a, b), std::max(a, b));
    }
    const std::vector<std::pair<size_t, size_t>> list(pairs.begin(), pairs.end());
    std::vector<Edge> edges;
    for (const auto& [a, b] : list) edges.push_back({&nodes.at(a), &nodes.at(b)});
    const std::vector<size_t> implied = implied_edges(edges);
    const auto reach = [&](const std::set<size_t>& without) {
      Reach r{};
      for (size_t i = 0; i < list.size(); ++i) {
        if (without.count(i) == 0) r.at(list[i].first).at(list[i].second) = true;
      }
      for (size_t k = 0; k < kNodes; ++k) {
        for (auto& row : r) {
          for (size_t j = 0; j < kNodes && row.at(k); ++j) row.at(j) = row.at(j) || r.at(k).at(j);
        }
      }
      return r;
    };
    std::set<size_t> without(implied.begin(), implied.end());
    EXPECT_EQ(reach({}), reach(without));
    // And no further one can go.
    for (size_t i = 0; i < edges.size(); ++i) {
      if (without.count(i) != 0) continue;
      std::set<size_t> more = without;
      more.insert(i);
      EXPECT_NE(reach({}), reach(more));
    }
  }
}

}  // namespace
}  // namespace keyhole::llama_cpp
