#include "index/types/saap.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/row_access.h"
#include "cpu/shared.h"
#include "index/partitions/ivf_lists.h"
#include "index/partitions/key_partitions.h"
#include "index/partitions/query_classifier.h"
#include "index/partitions/undone_scale.h"
#include "index/types/codec.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kC, kProbe, kPartitions, kClassifier, kIters, kSeed, kCodec };
enum PartitionSource : int64_t { kTrained, kOwn };
enum ClassifierUse : int64_t { kAuto, kOff };

constexpr size_t kMaxLists = size_t{1} << 24;
constexpr std::string_view kPartitionOptions[] = {"trained", "own"};
constexpr std::string_view kClassifierOptions[] = {"auto", "off"};

constexpr ParamDecl kParams[] = {
    integer("C", Stage::build, 0, 0, kMaxLists,
            "partitions of the context's own keys; 0: one per 32 keys, at most 1024"),
    integer("probe", Stage::search, 0, 0, kMaxLists,
            "partitions that a search scans for the whole group; 0: one in 50"),
    choice("partitions", Stage::build, kTrained, kPartitionOptions,
           "those of the engine's classifier, where it has one for the head, or always the "
           "context's own"),
    choice("classifier", Stage::build, kAuto, kClassifierOptions,
           "rank trained partitions by the classifier, or by their mean keys"),
    integer("iters", Stage::build, 10, 1, 1000, "k-means iterations"),
    integer("seed", Stage::build, 1234, 0, 2147483647, "of the k-means start"),
    choice("codec", Stage::build, kInt8, kCodecOptions, "what is scanned: " KEYHOLE_CODEC_TEXT),
};

constexpr size_t kKeysPerPartition = 32;
constexpr size_t kMostPartitions = 1024;  // the paper's number
constexpr size_t kAutoProbeShare = 50;    // measured: 5 % of the keys at C = 1024
constexpr size_t kRowsOfPart = 16384;     // rows of the tail that become a part

size_t own_partitions(const Spec& spec, size_t rows) {
  const auto asked = static_cast<size_t>(spec[kC]);
  const size_t count =
      asked != 0 ? asked : std::clamp<size_t>(rows / kKeysPerPartition, 1, kMostPartitions);
  return std::min(count, rows);
}

struct SaapScratch final : ListScratch {
  using ListScratch::ListScratch;
  std::vector<uint32_t> chosen;  ///< lists to scan
  QueryClassifier::Scratch network;
};

class SaapIndex final : public TypedIndex<SaapScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] size_t bytes() const override { return state_->bytes(); }
  [[nodiscard]] size_t bytes_of_others() const override {
    return state_.is_first() ? state_->lists.bytes_of_others() : state_->bytes();
  }
  [[nodiscard]] Sharing sharing() const override { return Sharing::rows; }
  [[nodiscard]] bool same_in_parts() const override { return !coded(); }

 protected:
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput& input) const override;
  void do_build(const BuildInput& input, const std::vector<float>& scale,
                const Progress& progress) override {
    state_ = cpu::Shared(build_state(input.keys, rope_of(input), scale, progress));
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const override;
  void do_commit(Addition& addition) override;
  void do_truncate(size_t count) override;
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<SaapIndex>(*this);
  }
  void reserve(SaapScratch& scratch) const override {
    reserve_ranking(scratch);
    if (coded()) scratch.rerank.reserve(scratch.max_group, scratch.max_k, count());
  }
  void find(const SearchArgs& args, SaapScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  struct State {
    State(const cpu::Kernels& kernels, uint32_t dim, DType dtype, bool coded)
        : lists(kernels, dim, dtype, false, coded) {}

    RopeUndo rope;
    bool trained = false;          // partitions are the classifier's
    KeyPartitions own;             // else these
    size_t partitions = 0;         // 0: no row yet
    std::vector<std::byte> means;  // `[partitions, dim]`; empty where the classifier ranks
    IvfLists lists;                // part p's list of partition c is list p * partitions + c
    std::vector<size_t> sizes;     // `[partitions]` rows
    std::vector<float> log_sizes;

    void count_sizes();
    [[nodiscard]] size_t bytes() const { return lists.bytes() + own.bytes() + means.capacity(); }
  };
  struct SaapGrowth final : Addition {
    IvfLists::Change change;
    cpu::Shared<State> first;  // the whole index, where there was none
  };

  [[nodiscard]] bool coded() const { return spec()[kCodec] == kInt8; }
  [[nodiscard]] size_t mean_bytes() const { return dim() * dtype_size(dtype()); }
  [[nodiscard]] bool uses_trained() const {
    return context().classifier != nullptr && spec()[kPartitions] == kTrained;
  }
  /// A classifier's partitions are those of keys whose channels are as the model has them.
  [[nodiscard]] RopeUndo rope_of(const BuildInput& input) const {
    return uses_trained() ? RopeUndo(input.rope, dim(), input.first_position)
                          : balanced_undo(kernels(), input, dim());
  }
  [[nodiscard]] const KeyPartitions& partitions(const State& state) const {
    return state.trained ? context().classifier->partitions() : state.own;
  }
  [[nodiscard]] size_t probe() const {
    const auto asked = static_cast<size_t>(spec()[kProbe]);
    const size_t share = (state_->partitions + kAutoProbeShare / 2) / kAutoProbeShare;
    return std::min(asked != 0 ? asked : std::max<size_t>(share, 1), state_->partitions);
  }
  [[nodiscard]] State build_state(const RowsView& keys, RopeUndo rope,
                                  const std::vector<float>& scale, const Progress& progress) const;
  void reserve_ranking(SaapScratch& scratch) const {
    scratch.reserve(dim(), state_->partitions);
    scratch.chosen.reserve(state_->lists.count());
    if (state_->means.empty()) scratch.network.reserve(scratch.max_group, state_->partitions);
  }
  void rank(const SearchArgs& args, SaapScratch& scratch, SearchCost& cost) const;

  cpu::Shared<State> state_{State(kernels(), dim(), dtype(), coded())};
};

void SaapIndex::State::count_sizes() {
  sizes.assign(partitions, 0);
  log_sizes.assign(partitions, kMinusInf);
  for (size_t l = 0; l < lists.count(); ++l) sizes[l % partitions] += lists.size(l);
  for (size_t c = 0; c < partitions; ++c) {
    if (sizes[c] != 0) log_sizes[c] = std::log(static_cast<float>(sizes[c]));
  }
}

std::vector<float> SaapIndex::learn_scale(const BuildInput& input) const {
  if (uses_trained()) return {};  // partitions and their space are the classifier's
  // Rows that are appended to an empty index come without RoPE's parameters: those of the build over no row hold.
  const RopeUndo rope = input.rope != nullptr ? rope_of(input) : state_->rope;
  return rope.changes() ? undone_scale(kernels(), input, rope) : BasicIndex::learn_scale(input);
}

SaapIndex::State SaapIndex::build_state(const RowsView& keys, RopeUndo rope,
                                        const std::vector<float>& scale,
                                        const Progress& progress) const {
  State state(kernels(), dim(), dtype(), coded());
  state.rope = std::move(rope);
  const size_t n = keys.tokens;
  if (n == 0) return state;
  state.trained = uses_trained();
  const size_t own = own_partitions(spec(), n);
  const auto iterations = static_cast<uint32_t>(spec()[kIters]);
  const double training =
      state.trained ? 0.0 : static_cast<double>(kmeans_sample(n, own)) * iterations;
  ProgressMeter meter(progress, training + static_cast<double>(n));
  if (!state.trained) {
    state.own = train_key_partitions(context(), keys, state.rope, scale, own, iterations,
                                     static_cast<uint32_t>(spec()[kSeed]), meter);
  }
  state.partitions = partitions(state).count();
  std::vector<Part> parts(1);
  parts[0].end = n;
  parts[0].lists =
      KeyLists(kernels(), dtype(), keys, 0,
               partition_rows(context(), partitions(state), keys, 0, n, state.rope, meter),
               state.partitions);
  if (!state.trained || spec()[kClassifier] == kOff) {
    state.means = mean_keys(context(), parts[0].lists, dim(), dtype(), state.rope);
  }
  state.lists.learn(keys);
  state.lists.apply(state.lists.with_parts(std::move(parts)));
  state.count_sizes();
  return state;
}

std::unique_ptr<Addition> SaapIndex::do_prepare(const RowsView& keys,
                                                const std::vector<float>& scale,
                                                const Progress& progress) const {
  auto growth = std::make_unique<SaapGrowth>();
  const IvfLists& lists = state_->lists;
  const size_t trained = lists.trained_rows();
  if (trained == 0) {
    growth->first = cpu::Shared(build_state(keys, state_->rope, scale, progress));
    return growth;
  }
  ProgressMeter meter(progress, static_cast<double>(keys.tokens - count()));
  std::vector<uint32_t> labels = lists.tail_labels();
  const std::vector<uint32_t> more = partition_rows(context(), partitions(*state_), keys, count(),
                                                    keys.tokens, state_->rope, meter);
  labels.insert(labels.end(), more.begin(), more.end());
  // After a short build parts double, so that there are never many.
  if (labels.size() >= std::min(kRowsOfPart, trained)) {
    std::vector<Part> parts(1);
    parts[0].begin = trained;
    parts[0].end = keys.tokens;
    parts[0].lists = KeyLists(kernels(), dtype(), keys, trained, labels, state_->partitions);
    growth->change = lists.with_parts(std::move(parts));
  } else {
    growth->change = lists.with_tail(keys, std::move(labels));
  }
  return growth;
}

void SaapIndex::do_commit(Addition& addition) {
  auto& growth = static_cast<SaapGrowth&>(addition);
  if (growth.first) {
    std::swap(state_, growth.first);
    return;
  }
  State& state = state_.own();
  state.lists.apply(std::move(growth.change));
  state.count_sizes();
}

void SaapIndex::do_truncate(size_t count) {
  if (count == 0) {  // partitions are of the rows: new ones get their own
    State empty(kernels(), dim(), dtype(), coded());
    empty.rope = state_->rope;
    state_ = cpu::Shared(std::move(empty));
    return;
  }
  State& state = state_.own();
  state.lists.truncate(count);
  state.count_sizes();
}

void SaapIndex::rank(const SearchArgs& args, SaapScratch& scratch, SearchCost& cost) const {
  const float* queries = state_->rope.queries(args, count(), scratch.queries.data());
  if (state_->means.empty()) {
    const QueryClassifier& classifier = *context().classifier;
    classifier.densities(queries, args.group, state_->log_sizes.data(), scratch.network,
                         scratch.ranking.importance());
    cost.bytes_read += classifier.network_bytes();
    return;
  }
  cpu::score_rows(kernels(), dense_rows(state_->means.data(), state_->partitions, dim(), dtype()),
                  queries, args.group, nullptr, state_->partitions, scratch.ranking.scores(),
                  scratch.ranking.stride());
  scratch.ranking.combine(args.group, state_->partitions);
  cost.bytes_read += state_->means.size();
}

void SaapIndex::find(const SearchArgs& args, SaapScratch& scratch, SearchCost& cost) const {
  reserve_ranking(scratch);
  rank(args, scratch, cost);
  const auto is_empty = [this](size_t c) { return state_->sizes[c] == 0; };
  scratch.chosen.clear();
  for (const uint32_t c : scratch.ranking.best(state_->partitions, probe(), is_empty)) {
    for (size_t l = c; l < state_->lists.count(); l += state_->partitions) {
      scratch.chosen.push_back(static_cast<uint32_t>(l));
    }
  }
  state_->lists.scan(scratch.chosen, args, keys(), scratch, cost);
}

void SaapIndex::describe(IndexInfo& info) const {
  state_->lists.describe(info);
  if (count() == 0) return;
  info.diagnostics.emplace_back("trained_partitions", state_->trained ? 1.0 : 0.0);
  Spec effective = spec();
  if (spec()[kC] == 0 && !state_->trained) {
    effective.set(kC, static_cast<int64_t>(state_->partitions));
  }
  if (spec()[kProbe] == 0) effective.set(kProbe, static_cast<int64_t>(probe()));
  info.params = effective.text();
}

void SaapIndex::save_body(Writer& out) const {
  out.put(static_cast<uint64_t>(state_->trained ? context().classifier->digest() : 0));
  out.put(static_cast<uint8_t>(state_->trained ? 1 : 0));
  state_->rope.save(out);
  state_->own.save(out);
  out.put(static_cast<uint64_t>(state_->means.size()));
  out.put_array(state_->means.data(), state_->means.size());
  state_->lists.save(out);
}

void SaapIndex::load_body(Reader& in, const RowsView& keys) {
  State state(kernels(), dim(), dtype(), coded());
  const auto digest = in.get<uint64_t>();
  const auto trained = in.get<uint8_t>();
  require_sound(trained <= 1, "partitions of an unknown kind");
  state.trained = trained == 1;
  if (state.trained && (!uses_trained() || context().classifier->digest() != digest)) {
    throw Error(Status::corrupt,
                "saved index: its partitions are of a classifier that this engine does not have");
  }
  state.rope = RopeUndo::load(in, dim());
  state.own = KeyPartitions::load(in, dim());
  require_sound(keys.tokens == 0 || (state.own.count() == 0) == state.trained,
                "partitions of two kinds, or none");
  state.partitions = keys.tokens == 0 ? 0 : partitions(state).count();
  const auto mean_bytes = in.get<uint64_t>();
  const bool with_means = keys.tokens != 0 && (!state.trained || spec()[kClassifier] == kOff);
  require_sound(mean_bytes == (with_means ? state.partitions * this->mean_bytes() : 0),
                "an impossible number of mean keys");
  state.means = in.get_array<std::byte>(mean_bytes);
  require_sound(kernels().all_finite[static_cast<size_t>(dtype())](
                    state.means.data(), mean_bytes / dtype_size(dtype())),
                "a mean key that is not finite");
  state.lists.load(in, keys);
  require_sound(state.lists.has_parts_of(state.partitions), "a part with other partitions");
  in.finish();
  state.count_sizes();
  state_ = cpu::Shared(std::move(state));
}

}  // namespace

const TypeDecl kSaapType = {
    "saap", "fixed partitions of keys before RoPE, chosen by a trained classifier of queries",
    kParams};

std::unique_ptr<Index> make_saap(const Spec& spec, uint32_t dim, DType dtype,
                                 const Context& context) {
  if (context.classifier != nullptr && context.classifier->dim() != dim) {
    throw Error(Status::invalid_argument, "a saap index for head dimension " + std::to_string(dim) +
                                              " with a classifier for " +
                                              std::to_string(context.classifier->dim()));
  }
  return std::make_unique<SaapIndex>(spec, dim, dtype, context);
}

size_t estimate_saap(const Spec& spec, size_t count, uint32_t dim, DType dtype) {
  if (count == 0) return 0;
  // Mean keys and centroids of its own, as if there were no classifier: at most 1 % of K too much.
  const size_t lists = own_partitions(spec, count);
  return IvfLists::estimate(count, lists, dim, dtype, spec[kCodec] == kInt8) +
         lists * (dim + 1) * sizeof(float);
}

}  // namespace keyhole::index
