#include "tools/engines/llama.cpp/implied_edges.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

using Sources = std::unordered_map<const void*, std::vector<const void*>>;

/// Whether a way leads from one node to another. Looks from its end, near nodes first: mostly it is short.
bool leads(const Sources& sources, const void* from, const void* to) {
  std::vector<const void*> look{to};
  std::unordered_set<const void*> seen{to};
  for (size_t i = 0; i < look.size(); ++i) {
    const auto found = sources.find(look[i]);
    if (found == sources.end()) continue;
    for (const void* source : found->second) {
      if (source == from) return true;
      if (seen.insert(source).second) look.push_back(source);
    }
  }
  return false;
}

}  // namespace

std::vector<size_t> implied_edges(std::span<const Edge> edges) {
  Sources sources;
  for (const Edge& edge : edges) sources[edge.to].push_back(edge.from);
  std::vector<size_t> implied;
  for (size_t i = 0; i < edges.size(); ++i) {
    const std::vector<const void*>& others = sources[edges[i].to];
    const auto implies = [&](const void* other) {
      return other != edges[i].from && leads(sources, edges[i].from, other);
    };
    if (others.size() > 1 && std::any_of(others.begin(), others.end(), implies)) {
      implied.push_back(i);
    }
  }
  return implied;
}

}  // namespace keyhole::llama_cpp
