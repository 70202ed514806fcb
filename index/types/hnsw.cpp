#include "index/types/hnsw.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/row_access.h"
#include "cpu/shared.h"
#include "index/graph/beam_search.h"
#include "index/graph/graph_repair.h"
#include "index/graph/hnsw_builder.h"
#include "index/graph/lone_rows.h"
#include "index/graph/row_marks.h"
#include "index/scan/twins.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kM, kEf, kEfc, kGeometry };
enum Geometry : int64_t { kLift, kIp };

constexpr uint32_t kMaxM = 512;
constexpr std::string_view kGeometryOptions[] = {"lift", "ip"};

constexpr ParamDecl kParams[] = {
    integer("M", Stage::build, 16, 2, kMaxM, "links chosen per key; its list on level 0 holds 2M"),
    integer("ef", Stage::search, 128, 1, 1 << 24,
            "beam of a search (never below k): more finds more and scores more keys"),
    integer("efc", Stage::build, 200, 1, 1 << 16, "beam of the build"),
    choice("geometry", Stage::build, kLift, kGeometryOptions,
           "how edges are chosen: by lifted L2, or by raw inner product, which collapses on "
           "attention keys"),
};

// A search for more than this share of the rows scans them all. A beam of k scores about 3k rows one by one,
// each at ten times the cost of a streamed one: the scan is faster there, and exact.
constexpr size_t kScanShare = 32;

struct HnswScratch final : SearchScratch {
  HnswScratch(uint32_t group, uint32_t k) : SearchScratch(group, k), beams(group) {}
  std::vector<Beam> beams;  ///< one per head
  RowMarks logged;          ///< rows that are in the collector's log
};

struct HnswGrowth final : Addition {
  cpu::Shared<Graph> graph;
  cpu::Shared<Twins> twins;  // nothing: those of the index
  LoneRows lone;
  Lift lift;
};

// Inner products with one query.
class HeadScore {
 public:
  HeadScore(const cpu::Kernels& kernels, const RowsView& keys, const float* query)
      : kernels_(kernels), keys_(keys), query_(query) {}

  void operator()(const uint32_t* ids, size_t n, float* out) const {
    cpu::score_rows(kernels_, keys_, query_, 1, ids, n, out, n);
  }

 private:
  const cpu::Kernels& kernels_;
  const RowsView& keys_;
  const float* query_;
};

class HnswIndex final : public TypedIndex<HnswScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::heads; }
  [[nodiscard]] bool same_in_parts() const override { return true; }
  [[nodiscard]] size_t bytes() const override {
    return graph_->bytes() + twins_->bytes() + lone_.bytes();
  }
  [[nodiscard]] size_t bytes_of_others() const override {
    return cpu::bytes_of_others(graph_) + cpu::bytes_of_others(twins_) + lone_.bytes_of_others();
  }

 protected:
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput& input) const override {
    return lifted() ? BasicIndex::learn_scale(input) : std::vector<float>{};
  }
  void do_build(const BuildInput& input, const std::vector<float>& scale,
                const Progress& progress) override;
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const override;
  void do_commit(Addition& addition) override;
  void do_truncate(size_t count) override;
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<HnswIndex>(*this);
  }
  void reserve(HnswScratch& scratch) const override {
    for (Beam& beam : scratch.beams) {
      beam.reserve(count(), most_pending(), beam_width(scratch.max_k));
    }
  }
  void reserve_log(HnswScratch& scratch) const override { scratch.logged.begin(count()); }
  void find(const SearchArgs& args, HnswScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  [[nodiscard]] uint32_t m() const { return static_cast<uint32_t>(spec()[kM]); }
  [[nodiscard]] bool lifted() const { return spec()[kGeometry] == kLift; }
  [[nodiscard]] size_t beam_width(uint32_t k) const {
    return std::min(std::max<size_t>(static_cast<size_t>(spec()[kEf]), k), count());
  }
  /// The longest key lies on the sphere.
  [[nodiscard]] Lift lift_of(const RowsView& keys, const Twins& twins,
                             const std::vector<float>& scale) const {
    if (!lifted()) return {};
    return Lift::of(kernels(), keys, scale, 1.0, twins.distinct(keys.tokens));
  }
  [[nodiscard]] Graph grow(const Graph& graph, const RowsView& keys, const Twins& twins,
                           const Lift& lift, const std::vector<float>& scale, LoneRows& lone,
                           ProgressMeter& meter) const;
  /// Rows that a search scores at once.
  [[nodiscard]] size_t most_pending() const {
    return std::max<size_t>(graph_->width(), 2 + lone_.starts().size());
  }
  /// Walks the upper levels greedily and returns the row where level 0 starts.
  [[nodiscard]] uint32_t descend(const HeadScore& score, SearchCost& cost) const;

  cpu::Shared<Graph> graph_{Graph()};
  cpu::Shared<Twins> twins_{Twins()};
  LoneRows lone_;  // where searches begin, too
  Lift lift_;      // of the build's keys
};

Graph HnswIndex::grow(const Graph& graph, const RowsView& keys, const Twins& twins,
                      const Lift& lift, const std::vector<float>& scale, LoneRows& lone,
                      ProgressMeter& meter) const {
  const LiftedKeys lifted_keys(kernels(), keys, lift, scale);
  const HnswConfig config = {.m = m(), .ef_construction = static_cast<uint32_t>(spec()[kEfc])};
  Graph grown = insert_rows(graph, lifted_keys, config, meter, twins);
  if (!lifted()) return grown;
  connect_all(grown, lifted_keys, twins);
  lone = lone.of(lifted_keys, twins);
  return grown;
}

void HnswIndex::do_build(const BuildInput& input, const std::vector<float>& scale,
                         const Progress& progress) {
  const RowsView& keys = input.keys;
  Graph graph(0, 2 * m(), m());
  Twins twins = Twins::among(kernels(), keys);
  Lift lift = lift_of(keys, twins, scale);
  LoneRows lone;
  if (keys.tokens > 0) {
    ProgressMeter meter(progress, static_cast<double>(keys.tokens));
    graph = grow(graph, keys, twins, lift, scale, lone, meter);
  }
  cpu::Shared shared_twins(std::move(twins));
  graph_ = cpu::Shared(std::move(graph));
  twins_ = std::move(shared_twins);
  lone_ = std::move(lone);
  lift_ = std::move(lift);
}

std::unique_ptr<Addition> HnswIndex::do_prepare(const RowsView& keys,
                                                const std::vector<float>& scale,
                                                const Progress& progress) const {
  auto grown = std::make_unique<HnswGrowth>();
  Twins twins = twins_->grown(kernels(), keys);
  grown->lift = count() == 0 ? lift_of(keys, twins, scale) : lift_;
  ProgressMeter meter(progress, static_cast<double>(keys.tokens - count()));
  const Graph nothing(0, 2 * m(), m());
  if (count() != 0) grown->lone = lone_;
  grown->graph = cpu::Shared(
      grow(count() == 0 ? nothing : *graph_, keys, twins, grown->lift, scale, grown->lone, meter));
  if (twins.size() != twins_->size()) grown->twins = cpu::Shared(std::move(twins));
  return grown;
}

void HnswIndex::do_commit(Addition& addition) {
  auto& grown = static_cast<HnswGrowth&>(addition);
  std::swap(graph_, grown.graph);
  if (grown.twins) std::swap(twins_, grown.twins);
  std::swap(lone_, grown.lone);
  std::swap(lift_, grown.lift);
}

void HnswIndex::do_truncate(size_t new_count) {
  Graph& graph = graph_.own();
  if (!twins_->empty()) twins_.own().truncate(new_count);
  if (!lifted()) return graph.truncate(new_count);
  RowsView rest = keys();
  rest.tokens = new_count;
  const LiftedKeys lifted_keys(kernels(), rest, lift_, channel_scale());
  remove_rows(graph, lifted_keys);
  connect_all(graph, lifted_keys, *twins_);
  lone_ = lone_.of(lifted_keys, *twins_);
}

uint32_t HnswIndex::descend(const HeadScore& score, SearchCost& cost) const {
  uint32_t tower = graph_->entry_tower();
  if (tower == kNoLink) return graph_->entry_row();
  const auto towers = graph_->towers();
  float best;
  score(&towers[tower].row, 1, &best);
  ++cost.keys_scored;
  for (uint32_t level = towers[tower].levels; level > 0; --level) {
    bool moved = true;
    while (moved) {
      moved = false;
      uint32_t rows[kMaxM];
      float scores[kMaxM];
      const auto links = graph_->upper_links(tower, level);
      std::transform(links.begin(), links.end(), rows, [&](uint32_t t) { return towers[t].row; });
      score(rows, links.size(), scores);
      cost.keys_scored += links.size();
      cost.bytes_read += graph_->upper_width() * sizeof(uint32_t);
      for (size_t i = 0; i < links.size(); ++i) {
        if (!(scores[i] > best)) continue;  // a NaN (an overflowed sum) ends the walk
        best = scores[i];
        tower = links[i];
        moved = true;
      }
    }
  }
  return towers[tower].row;
}

void HnswIndex::find(const SearchArgs& args, HnswScratch& scratch, SearchCost& cost) const {
  if (args.k >= count() / kScanShare) return scan_all(args, scratch, cost);
  // The heads are walked in turn: while the keys that one of them asked for are on their way, the others
  // expand and score. Results are those of one head after the other.
  const auto begin = static_cast<uint32_t>(args.begin_of(args.group));
  const auto end = static_cast<uint32_t>(args.end_of(args.group));
  const size_t ef = beam_width(args.k);
  const GraphLinks links{graph_.get()};
  uint32_t active[kMaxGroup];
  uint32_t walking = end - begin;
  Collector& collector = scratch.collector;
  for (uint32_t h = begin; h < end; ++h) {
    const HeadScore score(kernels(), keys(), args.queries + size_t{h} * dim());
    const std::array starts = {descend(score, cost), graph_->entry_row()};
    scratch.beams[h].reserve(count(), most_pending(), ef);
    scratch.beams[h].start(starts, ef, lone_.starts());
    active[h - begin] = h;
  }
  if (collector.logging()) scratch.logged.begin(count());
  while (walking > 0) {
    for (uint32_t i = 0; i < walking; ++i) {
      const HeadScore score(kernels(), keys(), args.queries + size_t{active[i]} * dim());
      Beam& beam = scratch.beams[active[i]];
      if (collector.logging()) {
        for (const uint32_t row : beam.pending()) {
          if (scratch.logged.insert(row)) collector.log_rows(&row, 1);
        }
      }
      beam.absorb(links, score);
    }
    uint32_t still = 0;
    for (uint32_t i = 0; i < walking; ++i) {
      Beam& beam = scratch.beams[active[i]];
      if (!beam.gather(links)) continue;
      for (const uint32_t row : beam.pending()) prefetch(keys().row(row), row_bytes());
      active[still++] = active[i];
    }
    walking = still;
  }
  size_t lists = 0;
  for (uint32_t h = begin; h < end; ++h) {
    const Beam& beam = scratch.beams[h];
    for (size_t i = 0; !collector.logging() && i < std::min<size_t>(beam.size(), args.k); ++i) {
      collector.top().offer_rank(h, beam.rank(i));
    }
    cost.keys_scored += beam.scored();
    lists += beam.expanded();
  }
  cost.bytes_read += cost.keys_scored * row_bytes() + lists * graph_->width() * sizeof(uint32_t);
  if (collector.logging()) score_log(args, collector, cost);
  collector.add_twins(*twins_);
}

void HnswIndex::describe(IndexInfo& info) const {
  const GraphShape shape = measure(*graph_, *twins_);
  info.diagnostics = {{"mean_degree", shape.mean_degree},
                      {"max_degree", shape.max_degree},
                      {"reachable_share", shape.reachable_share},
                      {"towers", static_cast<double>(graph_->towers().size())},
                      {"twins", static_cast<double>(twins_->size())},
                      {"lone_rows", static_cast<double>(lone_.rows().size())}};
  info.warning = warning_of(shape);
}

void HnswIndex::save_body(Writer& out) const {
  lift_.save(out);
  graph_->save(out);
}

void HnswIndex::load_body(Reader& in, const RowsView& keys) {
  Lift lift = Lift::load(in, dim());
  require_sound(lifted() || lift.radius == 0.0, "an impossible radius");
  Graph graph = Graph::load(in, keys.tokens, 2 * m(), m());
  in.finish();
  Twins twins = Twins::among(kernels(), keys);
  const bool is_changed = take_out(twins, graph);
  LoneRows lone;
  if (lifted()) {
    const LiftedKeys lifted_keys(kernels(), keys, lift, channel_scale());
    if (is_changed) connect_all(graph, lifted_keys, twins);
    lone = LoneRows::among(lifted_keys, twins);
  }
  cpu::Shared shared_twins(std::move(twins));
  graph_ = cpu::Shared(std::move(graph));
  twins_ = std::move(shared_twins);
  lone_ = std::move(lone);
  lift_ = std::move(lift);
}

}  // namespace

const TypeDecl kHnswType = {"hnsw", "graph over the keys alone, searched head by head", kParams};

std::unique_ptr<Index> make_hnsw(const Spec& spec, uint32_t dim, DType dtype,
                                 const Context& context) {
  return std::make_unique<HnswIndex>(spec, dim, dtype, context);
}

size_t estimate_hnsw(const Spec& spec, size_t count, uint32_t, DType) {
  const auto m = static_cast<uint32_t>(spec[kM]);
  return Graph::estimate(count, 2 * m, m);
}

}  // namespace keyhole::index
