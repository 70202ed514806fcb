#include "index/types/roargraph.h"

#include <algorithm>
#include <cmath>

#include "cpu/shared.h"
#include "index/graph/beam_search.h"
#include "index/graph/graph_repair.h"
#include "index/graph/group_walk.h"
#include "index/graph/guided_graph.h"
#include "index/graph/lone_rows.h"
#include "index/scan/rerank.h"
#include "index/scan/twins.h"
#include "index/types/codec.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kM, kEf, kNq, kQueries, kBeam, kCodec };

constexpr ParamDecl kParams[] = {
    integer("M", Stage::build, 16, 2, 256,
            "links that a key gets from the queries, from the keys, and between the results of a "
            "query: a list holds 3M"),
    integer("ef", Stage::search, 64, 1, 1 << 24,
            "beam of each head: more finds more and scores more keys"),
    integer("Nq", Stage::build, 100, 2, 1024, "nearest keys of a training query that are used"),
    integer("queries", Stage::build, 4096, 0, 1 << 24,
            "training queries that are used, late ones favoured; 0: all"),
    integer("beam", Stage::build, 100, 1, 1 << 16, "beam of the searches that connect the keys"),
    choice("codec", Stage::build, kInt8, kCodecOptions, "what is walked over: " KEYHOLE_CODEC_TEXT),
};

// A walk scores some 15 keys per place of its beam, each at several times the cost of a streamed one: beyond
// this share of the rows the scan is faster, and exact.
constexpr size_t kScanShare = 16;
// Longer keys than this share of all are outliers to the lift.
constexpr double kRadiusQuantile = 0.999;
constexpr size_t kMostEntries = 64;  // in a saved index

struct RoarScratch final : SearchScratch {
  using SearchScratch::SearchScratch;
  GroupWalk walk;
  Rerank rerank;
};

class RoarGraphIndex final : public TypedIndex<RoarScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::heads; }
  [[nodiscard]] size_t bytes() const override {
    return graph_->bytes() + twins_->bytes() + lone_.bytes() + (coded() ? codes_->bytes() : 0);
  }
  [[nodiscard]] size_t bytes_of_others() const override {
    return cpu::bytes_of_others(graph_) + cpu::bytes_of_others(twins_) + lone_.bytes_of_others() +
           (coded() ? cpu::bytes_of_others(codes_) : 0);
  }

 protected:
  void do_build(const BuildInput& input, const std::vector<float>& scale,
                const Progress& progress) override;
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const override;
  void do_commit(Addition& addition) override;
  void do_truncate(size_t count) override;
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<RoarGraphIndex>(*this);
  }
  void reserve(RoarScratch& scratch) const override {
    reserve_walk(scratch, scratch.max_group);
    if (coded()) scratch.rerank.reserve(scratch.max_group, scratch.max_k, count());
  }
  void find(const SearchArgs& args, RoarScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  [[nodiscard]] size_t ef() const { return static_cast<size_t>(spec()[kEf]); }
  [[nodiscard]] bool coded() const { return spec()[kCodec] == kInt8; }
  [[nodiscard]] GuidedConfig config() const {
    return {static_cast<uint32_t>(spec()[kM]), static_cast<uint32_t>(spec()[kBeam])};
  }
  void reserve_walk(RoarScratch& scratch, uint32_t group) const {
    scratch.walk.reserve(count(), graph_->width(), group, ef(), starts_.size());
  }
  [[nodiscard]] static uint32_t first_head(const SearchArgs& args) {
    return static_cast<uint32_t>(args.begin_of(args.group));
  }
  [[nodiscard]] static uint32_t end_head(const SearchArgs& args) {
    return static_cast<uint32_t>(args.end_of(args.group));
  }
  void walk_codes(const SearchArgs& args, RoarScratch& scratch, SearchCost& cost) const;
  void walk_keys(const SearchArgs& args, RoarScratch& scratch) const;
  static void choose_entry(Guidance& guidance, Graph& graph);
  /// The guidance's entries and lone rows.
  [[nodiscard]] static std::vector<uint32_t> starts_of(const Guidance& guidance,
                                                       const LoneRows& lone) {
    std::vector<uint32_t> starts = guidance.entries;
    starts.insert(starts.end(), lone.starts().begin(), lone.starts().end());
    return starts;
  }

  struct RoarGrowth final : Addition {
    GraphEdits edits;
    cpu::Shared<Twins> twins;  // nothing: those of the index
    LoneRows lone;
    std::vector<uint32_t> starts;
    std::vector<int8_t> codes;
    std::unique_ptr<RoarGraphIndex> first;  // the whole index, where there was none
  };

  cpu::Shared<Graph> graph_{Graph(0, 2, 0)};
  cpu::Shared<Twins> twins_{Twins()};
  Guidance guidance_;
  LoneRows lone_;
  std::vector<uint32_t> starts_;             // of searches
  Lift lift_;                                // of the build's keys
  cpu::Shared<KeyCodes> codes_{KeyCodes()};  // empty without a codec
};

void RoarGraphIndex::do_build(const BuildInput& input, const std::vector<float>& scale,
                              const Progress& progress) {
  const RowsView& keys = input.keys;
  const size_t most = spec()[kQueries] == 0 ? kMaxRows : static_cast<size_t>(spec()[kQueries]);
  const std::vector<uint32_t> chosen = choose_queries(input.queries, most);
  // A query's exact neighbours cost about as much as a key's place in the graph.
  ProgressMeter meter(progress, guided_work(keys.tokens, 2 * chosen.size()));
  Twins twins = Twins::among(kernels(), keys);
  const std::vector<uint32_t> distinct = twins.distinct(keys.tokens);
  const Neighbours neighbours =
      nearest_keys(context(), keys, input.first_position, input.queries, chosen,
                   static_cast<uint32_t>(spec()[kNq]), meter, distinct);
  Lift lift = Lift::of(kernels(), keys, scale, kRadiusQuantile, distinct);
  const LiftedKeys lifted(kernels(), keys, lift, scale);
  GuidedGraph built = build_guided(context(), lifted, neighbours, config(), meter, twins);
  LoneRows lone = LoneRows::among(lifted, twins);
  std::vector<uint32_t> starts = starts_of(built.guidance, lone);
  KeyCodes codes(kernels(), dim());
  if (coded()) codes.build(keys, 2 * keys.tokens);

  cpu::Shared shared_graph(std::move(built.graph));
  cpu::Shared shared_twins(std::move(twins));
  codes_ = cpu::Shared(std::move(codes));
  graph_ = std::move(shared_graph);
  twins_ = std::move(shared_twins);
  guidance_ = std::move(built.guidance);
  lone_ = std::move(lone);
  starts_ = std::move(starts);
  lift_ = std::move(lift);
}

std::unique_ptr<Addition> RoarGraphIndex::do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const {
  auto growth = std::make_unique<RoarGrowth>();
  if (count() == 0) {
    growth->first = std::make_unique<RoarGraphIndex>(spec(), dim(), dtype(), context());
    BuildInput input;
    input.keys = keys;
    growth->first->do_build(input, scale, progress);
    return growth;
  }
  ProgressMeter meter(progress, static_cast<double>(keys.tokens - count()));
  const LiftedKeys lifted(kernels(), keys, lift_, scale);
  Twins twins = twins_->grown(kernels(), keys);
  growth->edits = connect_rows(*graph_, lifted, guidance_.entries, config(), meter, twins);
  growth->lone = lone_.of(lifted, twins);
  growth->starts = starts_of(guidance_, growth->lone);
  if (twins.size() != twins_->size()) growth->twins = cpu::Shared(std::move(twins));
  if (coded()) growth->codes = codes_->encode(keys, count());
  return growth;
}

void RoarGraphIndex::do_commit(Addition& addition) {
  auto& growth = static_cast<RoarGrowth&>(addition);
  if (growth.first != nullptr) {
    RoarGraphIndex& first = *growth.first;
    graph_ = std::move(first.graph_);
    twins_ = std::move(first.twins_);
    guidance_ = std::move(first.guidance_);
    lone_ = std::move(first.lone_);
    starts_ = std::move(first.starts_);
    lift_ = std::move(first.lift_);
    codes_ = std::move(first.codes_);
    return;
  }
  Graph& graph = graph_.own();
  if (coded()) {
    KeyCodes& codes = codes_.own();
    codes.truncate(count());  // if the graph found no memory in an earlier attempt
    codes.append(growth.codes);
  }
  apply(growth.edits, graph);
  if (growth.twins) std::swap(twins_, growth.twins);
  std::swap(lone_, growth.lone);
  std::swap(starts_, growth.starts);
}

void RoarGraphIndex::do_truncate(size_t new_count) {
  RowsView rest = keys();
  rest.tokens = new_count;
  const LiftedKeys lifted(kernels(), rest, lift_, channel_scale());
  Graph& graph = graph_.own();
  if (!twins_->empty()) twins_.own().truncate(new_count);
  if (coded()) codes_.own().truncate(new_count);
  remove_rows(graph, lifted);
  std::erase_if(guidance_.entries, [&](uint32_t row) { return row >= new_count; });
  choose_entry(guidance_, graph);
  connect_all(graph, lifted, *twins_);
  lone_ = lone_.of(lifted, *twins_);
  starts_ = starts_of(guidance_, lone_);
}

void RoarGraphIndex::choose_entry(Guidance& guidance, Graph& graph) {
  if (guidance.entries.empty()) guidance.entries.push_back(0);
  graph.set_entry(guidance.entries[0]);
}

// ---- Search --------------------------------------------------------------------------------------------

void RoarGraphIndex::walk_keys(const SearchArgs& args, RoarScratch& scratch) const {
  struct Keys {
    const RoarGraphIndex& index;
    const SearchArgs& args;
    void score(const uint32_t* ids, size_t n, float* out, size_t stride) const {
      score_ids(index.kernels(), index.keys(), args, ids, n, out, stride);
    }
    void prefetch(uint32_t row) const { index::prefetch(index.keys().row(row), index.row_bytes()); }
  };
  scratch.walk.run(*graph_, starts_, first_head(args), end_head(args), ef(), Keys{*this, args},
                   [&](const uint32_t* rows, const float* scores, size_t stride, size_t n) {
                     scratch.collector.offer(scores, stride, rows, n);
                   });
}

void RoarGraphIndex::walk_codes(const SearchArgs& args, RoarScratch& scratch,
                                SearchCost& cost) const {
  struct Codes {
    const KeyCodes& codes;
    const KeyCodes::Queries& queries;
    void score(const uint32_t* ids, size_t n, float* out, size_t stride) const {
      codes.score(queries, codes.row(0), ids, n, out, stride);
    }
    void prefetch(uint32_t row) const { index::prefetch(codes.row(row), codes.stride()); }
  };
  scratch.rerank.begin(*codes_, args, count(), scratch.collector);
  scratch.walk.run(*graph_, starts_, first_head(args), end_head(args), ef(),
                   Codes{*codes_, scratch.rerank.queries()},
                   [&](const uint32_t* rows, const float* scores, size_t stride, size_t n) {
                     scratch.rerank.offer(scores, stride, rows, n);
                   });
  scratch.rerank.finish(kernels(), keys(), args, cost);
}

void RoarGraphIndex::find(const SearchArgs& args, RoarScratch& scratch, SearchCost& cost) const {
  if (std::max<size_t>(ef(), args.k / 4) >= count() / kScanShare) {
    return scan_all(args, scratch, cost);
  }
  reserve_walk(scratch, args.group);  // the re-ranking reserves its own memory when it begins
  if (coded()) {
    walk_codes(args, scratch, cost);
  } else {
    walk_keys(args, scratch);
    cost.exact_rows += scratch.walk.scored();
  }
  scratch.collector.add_twins(*twins_);
  const GroupWalk& walk = scratch.walk;
  cost.keys_scored += uint64_t{args.group} * walk.scored();
  cost.bytes_read += walk.scored() * (coded() ? codes_->stride() : row_bytes()) +
                     walk.lists() * graph_->width() * sizeof(uint32_t);
}

// ---- Figures, files ------------------------------------------------------------------------------------

void RoarGraphIndex::describe(IndexInfo& info) const {
  const GraphShape shape = measure(*graph_, *twins_);
  const auto rows = static_cast<double>(std::max<size_t>(count() - twins_->size(), 1));
  info.diagnostics = {{"mean_degree", shape.mean_degree},
                      {"max_degree", shape.max_degree},
                      {"reachable_share", shape.reachable_share},
                      {"training_queries", static_cast<double>(guidance_.queries)},
                      {"distinct_pivots", static_cast<double>(guidance_.pivots)},
                      {"unguided_share", 1.0 - static_cast<double>(guidance_.hit) / rows},
                      {"twins", static_cast<double>(twins_->size())},
                      {"lone_rows", static_cast<double>(lone_.rows().size())}};
  info.warning = warning_of(shape);
  if (info.warning.empty() && count() > 0 && guidance_.queries == 0) {
    info.warning = "no training query guides the graph: give q to the prefill";
  }
}

void RoarGraphIndex::save_body(Writer& out) const {
  lift_.save(out);
  out.put(static_cast<uint64_t>(guidance_.queries));
  out.put(static_cast<uint64_t>(guidance_.pivots));
  out.put(static_cast<uint64_t>(guidance_.hit));
  out.put(static_cast<uint32_t>(guidance_.entries.size()));
  out.put_array(guidance_.entries.data(), guidance_.entries.size());
  graph_->save(out);
  if (coded() && count() > 0) codes_->save(out);
}

void RoarGraphIndex::load_body(Reader& in, const RowsView& keys) {
  Lift lift = Lift::load(in, dim());
  Guidance guidance;
  guidance.queries = in.get<uint64_t>();
  guidance.pivots = in.get<uint64_t>();
  guidance.hit = in.get<uint64_t>();
  require_sound(guidance.pivots <= guidance.queries && guidance.hit <= kMaxRows,
                "more pivots than queries");
  const auto entries = in.get<uint32_t>();
  require_sound(entries <= kMostEntries, "too many entries");
  guidance.entries = in.get_array<uint32_t>(entries);
  require_sound(std::all_of(guidance.entries.begin(), guidance.entries.end(),
                            [&](uint32_t row) { return row < keys.tokens; }),
                "an entry that does not exist");
  require_sound((entries == 0) == (keys.tokens == 0), "rows without an entry");
  Graph graph = Graph::load(in, keys.tokens, config().width(), 0);
  KeyCodes codes(kernels(), dim());
  if (coded() && keys.tokens > 0) codes.load(in, keys);
  in.finish();
  Twins twins = Twins::among(kernels(), keys);
  const bool is_changed = take_out(twins, graph);
  const std::vector<uint32_t> representative = twins.representatives(keys.tokens);
  for (uint32_t& row : guidance.entries) row = representative[row];
  if (keys.tokens > 0) choose_entry(guidance, graph);
  const LiftedKeys lifted(kernels(), keys, lift, channel_scale());
  if (is_changed) connect_all(graph, lifted, twins);
  LoneRows lone = LoneRows::among(lifted, twins);
  std::vector<uint32_t> starts = starts_of(guidance, lone);
  cpu::Shared shared_graph(std::move(graph));
  cpu::Shared shared_twins(std::move(twins));
  codes_ = cpu::Shared(std::move(codes));
  graph_ = std::move(shared_graph);
  twins_ = std::move(shared_twins);
  lift_ = std::move(lift);
  lone_ = std::move(lone);
  starts_ = std::move(starts);
  guidance_ = std::move(guidance);
}

}  // namespace

const TypeDecl kRoarGraphType = {
    "roargraph", "graph whose edges the prompt's queries chose, searched by the whole group",
    kParams};

std::unique_ptr<Index> make_roargraph(const Spec& spec, uint32_t dim, DType dtype,
                                      const Context& context) {
  return std::make_unique<RoarGraphIndex>(spec, dim, dtype, context);
}

size_t estimate_roargraph(const Spec& spec, size_t count, uint32_t dim, DType) {
  const auto m = static_cast<uint32_t>(spec[kM]);
  return Graph::estimate(count, 3 * m, 0) +
         (spec[kCodec] == kInt8 ? KeyCodes::estimate(count, dim) : 0);
}

}  // namespace keyhole::index
