#include "index/hnsw_builder.h"

// hnswlib asserts where it could return; a library does not end its host.
#ifndef NDEBUG
#define NDEBUG
#endif
#include <hnswlib/hnswlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <span>
#include <utility>

#include "index/beam_search.h"

namespace keyhole::index {
namespace {

constexpr size_t kMeterRows = 64;  // inserted between two questions whether to go on

using Hnsw = hnswlib::HierarchicalNSW<float>;

// hnswlib keeps a copy of every vector. Its vectors are our row numbers: 4 bytes instead of 4(d+1), and
// distances are taken from the keys where they lie.
class RowSpace final : public hnswlib::SpaceInterface<float> {
 public:
  explicit RowSpace(LiftedKeys& keys) : keys_(&keys) {}
  size_t get_data_size() override { return sizeof(uint32_t); }
  hnswlib::DISTFUNC<float> get_dist_func() override { return distance; }
  void* get_dist_func_param() override { return keys_; }

  static uint32_t row(const void* point) { return *static_cast<const uint32_t*>(point); }

 private:
  // Between lifted keys, -inner product orders as L2 does. hnswlib holds its second argument still while
  // the first runs over a list, so the second is the one whose conversion to fp32 is worth keeping.
  static float distance(const void* a, const void* b, const void* param) {
    auto* keys = static_cast<LiftedKeys*>(const_cast<void*>(param));
    keys->aim(row(b));
    const uint32_t id = row(a);
    float similarity;
    keys->similarity(&id, 1, &similarity);
    return -similarity;
  }

  LiftedKeys* keys_;
};

// Geometric levels, P(level >= l) = m^-l, from the row number alone (splitmix64 as the hash).
uint32_t level_of(uint32_t row, uint32_t m) {
  uint64_t x = row + 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  const double uniform = (static_cast<double>(x >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
  return static_cast<uint32_t>(-std::log(uniform) / std::log(static_cast<double>(m)));
}

// Adjacency of one level, as beam_search wants it.
struct LevelLinks {
  const Hnsw* hnsw;
  int level;
  void prefetch(uint32_t row) const {
    const size_t bytes = level == 0 ? hnsw->size_links_level0_ : hnsw->size_links_per_element_;
    index::prefetch(hnsw->get_linklist_at_level(row, level), bytes);
  }
  std::span<const uint32_t> operator()(uint32_t row) const {
    auto* list = hnsw->get_linklist_at_level(row, level);
    return {list + 1, hnsw->getListCount(list)};
  }
};

// hnswlib's structure with room for `rows`. Its usual constructor may print a warning and takes 2.6 MB of
// locks for updates that never happen here; this one leaves the members to us.
class EmptyHnsw : public Hnsw {
 public:
  EmptyHnsw(RowSpace& space, size_t rows, const HnswConfig& config) : Hnsw(&space) {
    linkLists_ = nullptr;
    data_level0_memory_ = nullptr;
    visited_list_pool_ = nullptr;
    cur_element_count = 0;

    max_elements_ = rows;
    num_deleted_ = 0;
    M_ = config.m;
    maxM_ = M_;
    maxM0_ = 2 * M_;
    ef_construction_ = std::max<size_t>(config.ef_construction, M_);
    mult_ = 1.0 / std::log(static_cast<double>(M_));
    revSize_ = 1.0 / mult_;
    maxlevel_ = -1;
    enterpoint_node_ = kNoLink;
    fstdistfunc_ = space.get_dist_func();
    dist_func_param_ = space.get_dist_func_param();

    data_size_ = space.get_data_size();
    size_links_per_element_ = maxM_ * sizeof(uint32_t) + sizeof(uint32_t);
    size_links_level0_ = maxM0_ * sizeof(uint32_t) + sizeof(uint32_t);
    offsetLevel0_ = 0;
    offsetData_ = size_links_level0_;
    label_offset_ = size_links_level0_ + data_size_;
    size_data_per_element_ = label_offset_ + sizeof(hnswlib::labeltype);

    link_list_locks_ = std::vector<std::mutex>(rows);
    element_levels_ = std::vector<int>(rows);
    // malloc: hnswlib's destructor frees them.
    data_level0_memory_ = static_cast<char*>(std::malloc(rows * size_data_per_element_));
    linkLists_ = static_cast<char**>(std::malloc(rows * sizeof(char*)));
    if (data_level0_memory_ == nullptr || linkLists_ == nullptr) throw std::bad_alloc();
  }
};

class Builder {
 public:
  Builder(const Graph& graph, LiftedKeys& keys, const HnswConfig& config)
      : keys_(keys), config_(config), space_(keys), hnsw_(space_, keys.rows().count, config) {
    beam_.reserve(keys.rows().count, graph.width(), config.ef_construction);
    thaw(graph);
  }

  // The insertion of HNSW, algorithm 1. The searches are ours (gathered, prefetched scoring, a third of
  // the time of hnswlib's, which also reads past the end of full upper lists); the choice of neighbours
  // and the links both ways are hnswlib's.
  void insert(uint32_t row);
  [[nodiscard]] Graph freeze() const;

 private:
  [[nodiscard]] int levels(uint32_t row) const { return hnsw_.element_levels_[row]; }
  [[nodiscard]] auto scorer() const {
    return [this](const uint32_t* ids, size_t n, float* out) { keys_.similarity(ids, n, out); };
  }
  // Rows get the number that they have in the keys, so node and row are the same throughout.
  void place(uint32_t row, uint32_t level);
  void set_links(uint32_t row, int level, std::span<const uint32_t> targets);
  [[nodiscard]] uint32_t descend(uint32_t start, int from, int to);
  void thaw(const Graph& graph);

  LiftedKeys& keys_;
  HnswConfig config_;
  RowSpace space_;
  EmptyHnsw hnsw_;
  Beam beam_;
};

void Builder::place(uint32_t row, uint32_t level) {
  char* node = hnsw_.data_level0_memory_ + size_t{row} * hnsw_.size_data_per_element_;
  std::memset(node, 0, hnsw_.size_data_per_element_);
  std::memcpy(hnsw_.getDataByInternalId(row), &row, sizeof row);
  hnsw_.setExternalLabel(row, row);
  if (level > 0) {
    // calloc: hnswlib frees these lists.
    hnsw_.linkLists_[row] = static_cast<char*>(std::calloc(level, hnsw_.size_links_per_element_));
    if (hnsw_.linkLists_[row] == nullptr) throw std::bad_alloc();
  }
  hnsw_.element_levels_[row] = static_cast<int>(level);
  hnsw_.cur_element_count = row + 1;
}

void Builder::set_links(uint32_t row, int level, std::span<const uint32_t> targets) {
  auto* list = hnsw_.get_linklist_at_level(row, level);
  hnsw_.setListCount(list, static_cast<unsigned short>(targets.size()));
  std::copy(targets.begin(), targets.end(), list + 1);
}

void Builder::thaw(const Graph& graph) {
  const auto towers = graph.towers();
  uint32_t t = 0;
  for (uint32_t row = 0; row < graph.nodes(); ++row) {
    const bool is_tower = t < towers.size() && towers[t].row == row;
    place(row, is_tower ? towers[t].levels : 0);
    set_links(row, 0, graph.links(row));
    if (is_tower) ++t;
  }
  std::vector<uint32_t> rows;
  for (t = 0; t < towers.size(); ++t) {
    for (uint32_t level = 1; level <= towers[t].levels; ++level) {
      rows.clear();
      for (const uint32_t target : graph.upper_links(t, level)) rows.push_back(towers[target].row);
      set_links(towers[t].row, static_cast<int>(level), rows);
    }
  }
  if (graph.nodes() > 0) {
    hnsw_.enterpoint_node_ = graph.entry_row();
    hnsw_.maxlevel_ = levels(graph.entry_row());
  }
}

// Greedy walks from level `from` down to level `to`.
uint32_t Builder::descend(uint32_t start, int from, int to) {
  for (int level = from; level >= to; --level) {
    beam_.search(std::array{start}, 1, LevelLinks{&hnsw_, level}, scorer());
    start = rank_row(beam_.rank(0));
  }
  return start;
}

void Builder::insert(uint32_t row) {
  const auto level = static_cast<int>(level_of(row, config_.m));
  place(row, static_cast<uint32_t>(level));
  const int top = hnsw_.maxlevel_;
  if (top < 0) {
    hnsw_.enterpoint_node_ = row;
    hnsw_.maxlevel_ = level;
    return;
  }
  keys_.aim(row);
  uint32_t start = descend(hnsw_.enterpoint_node_, top, level + 1);
  for (int l = std::min(level, top); l >= 0; --l) {
    keys_.aim(row);
    beam_.search(std::array{start}, config_.ef_construction, LevelLinks{&hnsw_, l}, scorer());
    std::priority_queue<std::pair<float, uint32_t>, std::vector<std::pair<float, uint32_t>>,
                        Hnsw::CompareByFirst>
        candidates;
    for (size_t i = 0; i < beam_.size(); ++i) {
      candidates.emplace(-rank_score(beam_.rank(i)), rank_row(beam_.rank(i)));
    }
    start = hnsw_.mutuallyConnectNewElement(&row, row, candidates, l, false);
  }
  if (level > top) {
    hnsw_.enterpoint_node_ = row;
    hnsw_.maxlevel_ = level;
  }
}

Graph Builder::freeze() const {
  const auto nodes = static_cast<uint32_t>(hnsw_.cur_element_count);
  Graph graph(nodes, static_cast<uint32_t>(hnsw_.maxM0_), static_cast<uint32_t>(hnsw_.maxM_));
  std::vector<uint32_t> tower_of(nodes, kNoLink);
  for (uint32_t row = 0; row < nodes; ++row) {
    const auto links = LevelLinks{&hnsw_, 0}(row);
    std::copy(links.begin(), links.end(), graph.slots(row));
    if (levels(row) == 0) continue;
    tower_of[row] = static_cast<uint32_t>(graph.towers().size());
    graph.add_tower(row, static_cast<uint32_t>(levels(row)));
  }
  for (uint32_t t = 0; t < graph.towers().size(); ++t) {
    const Graph::Tower tower = graph.towers()[t];
    for (uint32_t level = 1; level <= tower.levels; ++level) {
      uint32_t* slots = graph.upper_slots(t, level);
      for (const uint32_t target : LevelLinks{&hnsw_, static_cast<int>(level)}(tower.row)) {
        *slots++ = tower_of[target];
      }
    }
  }
  graph.choose_entry();
  return graph;
}

}  // namespace

Graph insert_rows(const Graph& graph, LiftedKeys& keys, const HnswConfig& config,
                  ProgressMeter& meter) {
  const size_t count = keys.rows().count;
  try {
    Builder builder(graph, keys, config);
    for (size_t row = graph.nodes(); row < count; ++row) {
      if (row % kMeterRows == 0) {
        meter.advance(static_cast<double>(std::min(kMeterRows, count - row)));
      }
      builder.insert(static_cast<uint32_t>(row));
    }
    return builder.freeze();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::runtime_error& e) {
    throw Error(Status::internal, std::string("hnswlib: ") + e.what());
  }
}

}  // namespace keyhole::index
