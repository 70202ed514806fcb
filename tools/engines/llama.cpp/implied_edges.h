// Edges of a graph that others imply: what waits for b, which waits for a, need not wait for a.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace keyhole::llama_cpp {

/// From a node to one that comes behind it. Nodes are known by their addresses.
struct Edge {
  const void* from = nullptr;
  const void* to = nullptr;
};

/// Numbers of the edges of a graph without circles, rising, that can be left out all at once: there is another way from the
/// one end to the other. No two edges are alike.
[[nodiscard]] std::vector<size_t> implied_edges(std::span<const Edge> edges);

}  // namespace keyhole::llama_cpp
