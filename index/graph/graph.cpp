#include "index/graph/graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace keyhole::index {
namespace {

// HNSW draws levels with P(level >= l) = upper_width^-l; no plausible graph has a taller tower.
constexpr uint32_t kMaxLevels = 64;

// Keeps the links that `keep` maps to a row or position, in order, and empties the other slots.
template <class Keep>
void filter(uint32_t* slots, uint32_t width, Keep keep) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < width && slots[i] != kNoLink; ++i) {
    const uint32_t target = keep(slots[i]);
    if (target != kNoLink) slots[n++] = target;
  }
  std::fill(slots + n, slots + width, kNoLink);
}

}  // namespace

Graph::Graph(size_t nodes, uint32_t width, uint32_t upper_width, size_t capacity)
    : nodes_(nodes), width_(width), upper_width_(upper_width) {
  capacity = std::max(capacity, nodes);
  if (capacity == 0) return;
  links_ = cpu::ReservedBuffer(capacity * width * sizeof(uint32_t));
  std::memset(links_.data(), 0xFF, nodes * width * sizeof(uint32_t));  // kNoLink everywhere
}

void Graph::resize(size_t nodes) {
  const size_t list_bytes = width_ * sizeof(uint32_t);
  if (nodes * list_bytes > links_.bytes()) {
    cpu::ReservedBuffer larger(2 * nodes * list_bytes);
    if (nodes_ > 0) std::memcpy(larger.data(), links_.data(), nodes_ * list_bytes);
    links_ = std::move(larger);
  }
  if (nodes > nodes_) {
    std::memset(links_.data() + nodes_ * list_bytes, 0xFF, (nodes - nodes_) * list_bytes);
  }
  nodes_ = nodes;
}

void Graph::add_tower(uint32_t row, uint32_t levels) {
  const auto first_list = static_cast<uint32_t>(upper_.size() / upper_width_);
  upper_.resize(upper_.size() + size_t{levels} * upper_width_, kNoLink);
  towers_.push_back({row, levels, first_list});
}

void Graph::choose_entry() {
  entry_row_ = 0;
  entry_tower_ = kNoLink;
  for (uint32_t t = 0; t < towers_.size(); ++t) {
    if (entry_tower_ == kNoLink || towers_[t].levels > towers_[entry_tower_].levels) {
      entry_tower_ = t;
      entry_row_ = towers_[t].row;
    }
  }
}

void Graph::truncate(size_t count) {
  nodes_ = count;
  const auto below = [&](uint32_t row) { return row < count ? row : kNoLink; };
  for (uint32_t row = 0; row < count; ++row) filter(slots(row), width_, below);
  // Towers are in the order of rows: a prefix stays, and with it the positions that links name.
  const auto end = std::partition_point(towers_.begin(), towers_.end(),
                                        [&](const Tower& t) { return t.row < count; });
  if (end != towers_.end()) upper_.resize(size_t{end->first_list} * upper_width_);
  towers_.erase(end, towers_.end());
  const auto towers = static_cast<uint32_t>(towers_.size());
  for (uint32_t t = 0; t < towers; ++t) {
    for (uint32_t level = 1; level <= towers_[t].levels; ++level) {
      filter(upper_slots(t, level), upper_width_,
             [&](uint32_t target) { return target < towers ? target : kNoLink; });
    }
  }
  choose_entry();
}

size_t Graph::bytes() const {
  return nodes_ * width_ * sizeof(uint32_t) + towers_.capacity() * sizeof(Tower) +
         upper_.capacity() * sizeof(uint32_t);
}

size_t Graph::estimate(size_t nodes, uint32_t width, uint32_t upper_width) {
  if (upper_width == 0) return nodes * width * sizeof(uint32_t);
  const double m = upper_width;
  const double towers = static_cast<double>(nodes) / m;
  const double lists = static_cast<double>(nodes) / (m - 1.0);  // n/m + n/m^2 + ...
  return nodes * width * sizeof(uint32_t) +
         static_cast<size_t>(towers * sizeof(Tower) + lists * m * sizeof(uint32_t));
}

void Graph::save(Writer& out) const {
  for (uint32_t row = 0; row < nodes_; ++row) {
    const auto list = links(row);
    out.put(static_cast<uint16_t>(list.size()));
    out.put_array(list.data(), list.size());
  }
  out.put(static_cast<uint64_t>(towers_.size()));
  for (const Tower& tower : towers_) {
    out.put(tower.row);
    out.put(static_cast<uint16_t>(tower.levels));
  }
  out.put_array(upper_.data(), upper_.size());
}

Graph Graph::load(Reader& in, size_t nodes, uint32_t width, uint32_t upper_width) {
  // Everything is read before the big buffer is made: a false count meets the stream's end first.
  std::vector<uint16_t> degrees;
  std::vector<uint32_t> links;
  for (size_t row = 0; row < nodes; ++row) {
    const auto degree = in.get<uint16_t>();
    require_sound(degree <= width, "a row with too many links");
    degrees.push_back(degree);
    links.resize(links.size() + degree);
    uint32_t* list = links.data() + links.size() - degree;
    in.get_into(list, degree);
    require_sound(std::all_of(list, list + degree,
                              [&](uint32_t target) { return target < nodes && target != row; }),
                  "a link to a row that does not exist");
  }
  Graph graph(nodes, width, upper_width);
  const uint32_t* list = links.data();
  for (uint32_t row = 0; row < nodes; ++row) {
    std::copy(list, list + degrees[row], graph.slots(row));
    list += degrees[row];
  }

  const auto towers = in.get<uint64_t>();
  require_sound(towers <= nodes, "more towers than rows");
  require_sound(towers == 0 || upper_width > 0, "a tower in a graph of one level");
  for (uint64_t t = 0; t < towers; ++t) {
    const auto row = in.get<uint32_t>();
    const auto levels = in.get<uint16_t>();
    require_sound(row < nodes && (t == 0 || row > graph.towers_.back().row), "towers out of order");
    require_sound(levels >= 1 && levels <= kMaxLevels, "an impossible level");
    const auto lists =
        graph.towers_.empty() ? 0 : graph.towers_.back().first_list + graph.towers_.back().levels;
    graph.towers_.push_back({row, levels, lists});
  }
  if (towers > 0) {
    const Tower& last = graph.towers_.back();
    graph.upper_ = in.get_array<uint32_t>((size_t{last.first_list} + last.levels) * upper_width);
  }
  for (uint32_t t = 0; t < towers; ++t) {
    for (uint32_t level = 1; level <= graph.towers_[t].levels; ++level) {
      const uint32_t* slots = graph.upper_slots(t, level);
      const size_t filled_slots = graph.upper_links(t, level).size();
      for (uint32_t i = 0; i < upper_width; ++i) {
        const uint32_t target = slots[i];
        require_sound(i < filled_slots
                          ? target < towers && target != t && graph.towers_[target].levels >= level
                          : target == kNoLink,
                      "a link to a row that is not on that level");
      }
    }
  }
  graph.choose_entry();
  return graph;
}

size_t mark_reachable(const Graph& graph, uint32_t start, std::vector<uint8_t>& mark) {
  if (mark[start] != 0) return 0;
  std::vector<uint32_t> open = {start};
  mark[start] = 1;
  size_t marked = 1;
  while (!open.empty()) {
    const uint32_t row = open.back();
    open.pop_back();
    for (const uint32_t next : graph.links(row)) {
      if (mark[next] != 0) continue;
      mark[next] = 1;
      ++marked;
      open.push_back(next);
    }
  }
  return marked;
}

std::string warning_of(const GraphShape& shape) {
  // Graphs that work on attention keys have 99.9 % and more; torn ones 5 to 60 % (see lifted_keys.h).
  if (shape.reachable_share >= 0.999) return "";
  const int percent = static_cast<int>(100.0 * shape.reachable_share);
  return "only " + std::to_string(percent) + " % of the keys can be reached in the graph";
}

GraphShape measure(const Graph& graph, const Twins& twins) {
  if (graph.nodes() == 0) return {0.0, 0.0, 1.0};
  size_t links = 0;
  size_t most = 0;
  for (uint32_t row = 0; row < graph.nodes(); ++row) {
    const size_t degree = graph.links(row).size();
    links += degree;
    most = std::max(most, degree);
  }
  std::vector<uint8_t> mark(graph.nodes(), 0);
  size_t reachable = mark_reachable(graph, graph.entry_row(), mark);
  for (uint32_t row = 0; row < graph.nodes(); ++row) {
    if (mark[row] != 0) reachable += twins.of(row).size();
  }
  const auto n = static_cast<double>(graph.nodes());
  return {static_cast<double>(links) / (n - static_cast<double>(twins.size())),
          static_cast<double>(most), static_cast<double>(reachable) / n};
}

}  // namespace keyhole::index
