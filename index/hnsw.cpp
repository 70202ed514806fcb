#include "index/hnsw.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "index/base.h"
#include "index/beam_search.h"
#include "index/graph_repair.h"
#include "index/hnsw_builder.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kM, kEf, kEfc, kGeometry };
enum Geometry : int64_t { kLift, kIp };

constexpr std::string_view kGeometryOptions[] = {"lift", "ip"};

constexpr ParamDecl kParams[] = {
    {"M", Stage::build, 16, 2, 512, {}, "links chosen per key; its list on level 0 holds 2M"},
    {"ef",
     Stage::search,
     128,
     1,
     1 << 24,
     {},
     "beam of a search (never below k): more finds more and scores more keys"},
    {"efc", Stage::build, 200, 1, 1 << 16, {}, "beam of the build"},
    {"geometry", Stage::build, kLift, 0, 0, kGeometryOptions,
     "how edges are chosen: lift = lifted L2; ip = raw inner product, which collapses on attention "
     "keys"},
};

struct HnswScratch final : SearchScratch {
  using SearchScratch::SearchScratch;
  Beam beam;
};

// One head's view of the graph while it is searched; counts what the greedy descent does.
class HeadSearch {
 public:
  HeadSearch(const cpu::Kernels& kernels, const RowsView& keys, const float* query)
      : score_(kernels.score[static_cast<size_t>(keys.dtype)]), keys_(keys), query_(query) {}

  void operator()(const uint32_t* ids, size_t n, float* out) const {
    score_({.queries = query_,
            .group = 1,
            .dim = keys_.dim,
            .keys = keys_.data,
            .key_stride = keys_.stride,
            .ids = ids,
            .count = n,
            .scores = out,
            .score_stride = n});
  }

 private:
  void (*score_)(const cpu::ScoreArgs&);
  const RowsView& keys_;
  const float* query_;
};

struct GraphLinks {
  const Graph* graph;
  [[nodiscard]] const uint32_t* address(uint32_t row) const { return graph->slots(row); }
  std::span<const uint32_t> operator()(uint32_t row) const { return graph->links(row); }
};

class HnswIndex final : public BasicIndex {
 public:
  using BasicIndex::BasicIndex;

  [[nodiscard]] std::unique_ptr<Scratch> make_scratch(uint32_t max_group,
                                                      uint32_t max_k) const override {
    auto scratch = std::make_unique<HnswScratch>(max_group, max_k);
    scratch->top.begin(max_group, max_k, count());
    scratch->beam.reserve(count(), graph_.width(), beam_width(max_k));
    return scratch;
  }

 protected:
  void do_build(const BuildInput& input, const Progress& progress) override;
  void do_append(const RowsView& keys, const Progress& progress) override;
  void do_truncate(size_t count) override;
  void do_search(const float* queries, uint32_t group, uint32_t k, SearchScratch& scratch,
                 Hits& hits) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  [[nodiscard]] uint32_t m() const { return static_cast<uint32_t>(spec()[kM]); }
  [[nodiscard]] bool lifted() const { return spec()[kGeometry] == kLift; }
  [[nodiscard]] size_t beam_width(uint32_t k) const {
    return std::min(std::max<size_t>(static_cast<size_t>(spec()[kEf]), k), count());
  }
  [[nodiscard]] Graph grow(const Graph& graph, const RowsView& keys, double radius,
                           ProgressMeter& meter) const;
  /// Walks the upper levels greedily and returns the row where level 0 starts.
  [[nodiscard]] uint32_t descend(const HeadSearch& score, Hits& hits) const;

  Graph graph_;
  double radius_ = 0.0;  // phi of the lift: the longest key of the build; 0: no lift
};

Graph HnswIndex::grow(const Graph& graph, const RowsView& keys, double radius,
                      ProgressMeter& meter) const {
  LiftedKeys lifted_keys(kernels(), keys, radius);
  const HnswConfig config = {.m = m(), .ef_construction = static_cast<uint32_t>(spec()[kEfc])};
  Graph grown = insert_rows(graph, lifted_keys, config, meter);
  if (lifted()) connect_all(grown, lifted_keys);
  return grown;
}

void HnswIndex::do_build(const BuildInput& input, const Progress& progress) {
  const RowsView& keys = input.keys;
  Graph graph(0, 2 * m(), m());
  const double radius = lifted() ? LiftedKeys::largest_norm(kernels(), keys) : 0.0;
  if (keys.count > 0) {
    ProgressMeter meter(progress, static_cast<double>(keys.count));
    graph = grow(graph, keys, radius, meter);
  }
  graph_ = std::move(graph);
  radius_ = radius;
}

void HnswIndex::do_append(const RowsView& keys, const Progress& progress) {
  if (count() == 0) {
    BuildInput input;
    input.keys = keys;
    return do_build(input, progress);
  }
  ProgressMeter meter(progress, static_cast<double>(keys.count - count()));
  graph_ = grow(graph_, keys, radius_, meter);
}

void HnswIndex::do_truncate(size_t new_count) {
  if (!lifted()) return graph_.truncate(new_count);
  RowsView rest = keys();
  rest.count = new_count;
  LiftedKeys lifted_keys(kernels(), rest, radius_);
  remove_rows(graph_, lifted_keys);
  connect_all(graph_, lifted_keys);
}

uint32_t HnswIndex::descend(const HeadSearch& score, Hits& hits) const {
  uint32_t tower = graph_.entry_tower();
  if (tower == kNoLink) return graph_.entry_row();
  const auto towers = graph_.towers();
  float best;
  score(&towers[tower].row, 1, &best);
  ++hits.keys_scored;
  for (uint32_t level = towers[tower].levels; level > 0; --level) {
    bool moved = true;
    while (moved) {
      moved = false;
      // At most M = 512 neighbours.
      uint32_t rows[512];
      float scores[512];
      const auto links = graph_.upper_links(tower, level);
      std::transform(links.begin(), links.end(), rows, [&](uint32_t t) { return towers[t].row; });
      score(rows, links.size(), scores);
      hits.keys_scored += links.size();
      hits.bytes_read += graph_.upper_width() * sizeof(uint32_t);
      for (size_t i = 0; i < links.size(); ++i) {
        if (scores[i] <= best) continue;
        best = scores[i];
        tower = links[i];
        moved = true;
      }
    }
  }
  return towers[tower].row;
}

void HnswIndex::do_search(const float* queries, uint32_t group, uint32_t k, SearchScratch& base,
                          Hits& hits) const {
  if (k >= count()) return scan_all(queries, group, base, hits);
  auto* scratch = dynamic_cast<HnswScratch*>(&base);
  if (scratch == nullptr) {
    throw Error(Status::invalid_argument, "search of an hnsw index with another type's scratch");
  }
  const size_t ef = beam_width(k);
  Beam& beam = scratch->beam;
  beam.reserve(count(), graph_.width(), ef);
  size_t lists = 0;
  for (uint32_t h = 0; h < group; ++h) {
    const HeadSearch score(kernels(), keys(), queries + size_t{h} * dim());
    const std::array starts = {descend(score, hits), graph_.entry_row()};
    for (const uint64_t rank : beam.search(starts, ef, GraphLinks{&graph_}, score)) {
      scratch->top.offer_rank(h, rank);
    }
    hits.keys_scored += beam.scored();
    lists += beam.expanded();
  }
  hits.bytes_read += hits.keys_scored * row_bytes() + lists * graph_.width() * sizeof(uint32_t);
}

void HnswIndex::describe(IndexInfo& info) const {
  const GraphShape shape = measure(graph_);
  info.bytes = graph_.bytes();
  info.diagnostics = {{"mean_degree", shape.mean_degree},
                      {"max_degree", shape.max_degree},
                      {"reachable_share", shape.reachable_share},
                      {"towers", static_cast<double>(graph_.towers().size())}};
}

void HnswIndex::save_body(Writer& out) const {
  out.put(radius_);
  graph_.save(out);
}

void HnswIndex::load_body(Reader& in, const RowsView& keys) {
  const auto radius = in.get<double>();
  require_sound(std::isfinite(radius) && radius >= 0.0 && (lifted() || radius == 0.0),
                "an impossible radius");
  Graph graph = Graph::load(in, keys.count, 2 * m(), m());
  in.finish();
  graph_ = std::move(graph);
  radius_ = radius;
}

}  // namespace

const TypeDecl kHnswType = {"hnsw", "graph over the keys (hnswlib), searched head by head",
                            kParams};

std::unique_ptr<Index> make_hnsw(const Spec& spec, uint32_t dim, DType dtype,
                                 const Context& context) {
  return std::make_unique<HnswIndex>(spec, dim, dtype, context);
}

size_t estimate_hnsw(const Spec& spec, size_t count, uint32_t, DType) {
  const auto m = static_cast<uint32_t>(spec[kM]);
  return Graph::estimate(count, 2 * m, m);
}

}  // namespace keyhole::index
