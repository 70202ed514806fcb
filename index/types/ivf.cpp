#include "index/types/ivf.h"

#include <algorithm>
#include <utility>

#include "cpu/row_access.h"
#include "cpu/shared.h"
#include "index/partitions/ivf_lists.h"
#include "index/partitions/undone_scale.h"
#include "index/types/codec.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t {
  kC,
  kProbe,
  kTrain,
  kSegment,
  kIters,
  kMetric,
  kCenter,
  kSeed,
  kRope,
  kCodec
};
enum Train : int64_t { kGlobal, kSegmented };
enum Metric : int64_t { kL2, kIp };
enum RopeUse : int64_t { kKeep, kUndo };

constexpr size_t kMaxLists = size_t{1} << 24;
constexpr std::string_view kTrainOptions[] = {"global", "segmented"};
constexpr std::string_view kMetricOptions[] = {"l2", "ip"};
constexpr std::string_view kRopeOptions[] = {"keep", "undo"};

constexpr ParamDecl kParams[] = {
    integer("C", Stage::build, 0, 0, kMaxLists, "partitions; 0: one per 64 keys"),
    integer("probe", Stage::search, 0, 0, kMaxLists,
            "partitions that a search scans for the whole group; 0: an eighth of all, at least 64"),
    choice("train", Stage::build, kSegmented, kTrainOptions,
           "k-means over all keys at once, or over segments of the text apart, which takes "
           "segment/keys of the time"),
    integer("segment", Stage::build, 16384, 64, 1 << 24,
            "keys per segment; appended keys are clustered once this many have come in"),
    integer("iters", Stage::build, 10, 1, 1000, "k-means iterations"),
    choice("metric", Stage::build, kL2, kMetricOptions,
           "k-means by L2 distance, or spherical k-means by inner product"),
    integer("center", Stage::build, 1, 0, 1,
            "1: cluster the keys minus their mean (no softmax changes by it)"),
    integer("seed", Stage::build, 1234, 0, 2147483647, "of the k-means start"),
    choice(
        "rope", Stage::build, kKeep, kRopeOptions,
        "cluster and probe keys and queries as the model scores them, or as they are before RoPE"),
    choice("codec", Stage::build, kInt8, kCodecOptions, "what is scanned: " KEYHOLE_CODEC_TEXT),
};

constexpr size_t kKeysPerList = 64;
// Measured on the testbed's heads: an eighth finds 80 % of the best 100 keys at 32k and 87 to 93 % at 128k. Below
// 32k that would be few keys, and reading more of them costs little: 64 lists are 4k keys, 90 us.
constexpr size_t kAutoProbeShare = 8;
constexpr size_t kLeastAutoProbe = 64;
// Keeps an explicit C on a short build from fixing tiny lists for all rows to come.
constexpr size_t kLeastKeysPerAppendedList = 16;

size_t rounded_share(size_t n, size_t per) { return std::max<size_t>((n + per / 2) / per, 1); }

size_t lists_of_build(const Spec& spec, size_t rows) {
  const auto lists = static_cast<size_t>(spec[kC]);
  return lists != 0 ? std::min(lists, rows) : rounded_share(rows, kKeysPerList);
}

// Piece i of n divided into `pieces` nearly equal ones begins here.
size_t piece(size_t n, size_t pieces, size_t i) { return n * i / pieces; }

class IvfIndex final : public TypedIndex<ListScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::rows; }
  // With codes, each part ranks somewhat more than k rows again.
  [[nodiscard]] bool same_in_parts() const override { return !coded(); }
  [[nodiscard]] size_t bytes() const override { return lists_->bytes(); }
  [[nodiscard]] size_t bytes_of_others() const override {
    return lists_.is_first() ? lists_->bytes_of_others() : lists_->bytes();
  }

 protected:
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput& input) const override;
  void do_build(const BuildInput& input, const std::vector<float>& scale,
                const Progress& progress) override;
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const override;
  void do_commit(Addition& addition) override;
  void do_truncate(size_t count) override { lists_.own().truncate(count); }
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<IvfIndex>(*this);
  }
  void reserve(ListScratch& scratch) const override {
    scratch.reserve(dim(), lists_->count());
    if (coded()) scratch.rerank.reserve(scratch.max_group, scratch.max_k, count());
  }
  void find(const SearchArgs& args, ListScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  [[nodiscard]] size_t probe() const {
    const auto asked = static_cast<size_t>(spec()[kProbe]);
    if (asked != 0) return std::min(asked, lists_->count());
    return std::min(std::max(rounded_share(lists_->count(), kAutoProbeShare), kLeastAutoProbe),
                    lists_->count());
  }
  [[nodiscard]] bool coded() const { return spec()[kCodec] == kInt8; }
  [[nodiscard]] RopeUndo rope_of(const BuildInput& input) const {
    if (spec()[kRope] == kKeep) return {};
    return balanced_undo(kernels(), input, dim());
  }
  void build_lists(const RowsView& keys, RopeUndo rope, const std::vector<float>& scale,
                   const Progress& progress);
  /// Rows [begin, end) clustered in `segments` parts of nearly equal size, `lists` lists in all.
  [[nodiscard]] std::vector<Part> train(const RowsView& keys, size_t begin, size_t end,
                                        size_t segments, size_t lists, const RopeUndo& rope,
                                        const std::vector<float>& scale,
                                        ProgressMeter& meter) const;
  /// The nearest list of each of the rows [begin, end).
  [[nodiscard]] std::vector<uint32_t> assign(const RowsView& keys, size_t begin, size_t end,
                                             ProgressMeter& meter) const;

  struct IvfGrowth final : Addition {
    IvfLists::Change change;
    std::unique_ptr<IvfIndex> first;  // the whole index, where there was none
  };

  RopeUndo rope_;
  cpu::Shared<IvfLists> lists_{IvfLists(kernels(), dim(), dtype(), true, coded())};
  size_t rows_per_list_ = kKeysPerList;  // what appended parts aim at
};

std::vector<Part> IvfIndex::train(const RowsView& keys, size_t begin, size_t end, size_t segments,
                                  size_t lists, const RopeUndo& rope,
                                  const std::vector<float>& scale, ProgressMeter& meter) const {
  const PartConfig config = {
      .iterations = static_cast<uint32_t>(spec()[kIters]),
      .nearness = spec()[kMetric] == kL2 ? Nearness::l2 : Nearness::inner_product,
      .center = spec()[kCenter] != 0,
      .seed = static_cast<uint32_t>(spec()[kSeed]),
      .rope = &rope,
      .scale = scale,
      .dtype = dtype()};
  const size_t n = end - begin;
  segments = std::min(segments, lists);
  std::vector<Part> parts(segments);
  const auto train_one = [&](uint32_t i, uint32_t) {
    const size_t b = begin + piece(n, segments, i);
    const size_t e = begin + piece(n, segments, i + 1);
    const size_t share = piece(lists, segments, i + 1) - piece(lists, segments, i);
    parts[i] = train_part(context(), keys, b, e, std::min(share, e - b), config, meter);
  };
  cpu::run_on(context().pool, segments, train_one);
  return parts;
}

std::vector<uint32_t> IvfIndex::assign(const RowsView& keys, size_t begin, size_t end,
                                       ProgressMeter& meter) const {
  std::vector<uint32_t> labels(end - begin);
  const std::vector<float> means =
      rows_as_f32(kernels(), lists_->means(), 0, lists_->count(), {}, channel_scale());
  const std::vector<float> points =
      rows_as_f32(kernels(), keys, begin, end, rope_, channel_scale());
  NearestCentroid nearest(kernels(), Nearness::l2, dim());
  nearest.set(means.data(), lists_->count());
  assign_points(nearest, context().pool, points.data(), labels.size(), dim(), labels.data(), meter);
  return labels;
}

std::vector<float> IvfIndex::learn_scale(const BuildInput& input) const {
  // Rows that are appended to an empty index come without RoPE's parameters: those of the build over no row hold.
  const RopeUndo rope = input.rope != nullptr ? rope_of(input) : rope_;
  return rope.changes() ? undone_scale(kernels(), input, rope) : BasicIndex::learn_scale(input);
}

void IvfIndex::do_build(const BuildInput& input, const std::vector<float>& scale,
                        const Progress& progress) {
  build_lists(input.keys, rope_of(input), scale, progress);
}

void IvfIndex::build_lists(const RowsView& keys, RopeUndo rope, const std::vector<float>& scale,
                           const Progress& progress) {
  const size_t n = keys.tokens;
  IvfLists next(kernels(), dim(), dtype(), true, coded());
  size_t rows_per_list = kKeysPerList;
  if (n > 0) {
    const size_t lists = lists_of_build(spec(), n);
    const size_t segments =
        spec()[kTrain] == kGlobal ? 1 : rounded_share(n, static_cast<size_t>(spec()[kSegment]));
    ProgressMeter meter(progress, part_work(n, lists, static_cast<uint32_t>(spec()[kIters])));
    next.learn(keys);
    next.apply(next.with_parts(train(keys, 0, n, segments, lists, rope, scale, meter)));
    if (spec()[kC] != 0) rows_per_list = std::max(n / lists, kLeastKeysPerAppendedList);
  }
  lists_ = cpu::Shared(std::move(next));
  rows_per_list_ = rows_per_list;
  rope_ = std::move(rope);
}

std::unique_ptr<Addition> IvfIndex::do_prepare(const RowsView& keys,
                                               const std::vector<float>& scale,
                                               const Progress& progress) const {
  auto growth = std::make_unique<IvfGrowth>();
  const size_t trained = lists_->trained_rows();
  if (trained == 0) {
    growth->first = std::make_unique<IvfIndex>(spec(), dim(), dtype(), context());
    growth->first->build_lists(keys, rope_, scale, progress);
    return growth;
  }
  // Rows of the tail are few against a segment, and against the trained ones: after a short build, parts
  // double until they have the length of a segment.
  const size_t waiting = keys.tokens - trained;
  const auto segment = static_cast<size_t>(spec()[kSegment]);
  if (waiting >= std::min(segment, trained)) {
    const size_t lists = std::min(rounded_share(waiting, rows_per_list_), waiting);
    ProgressMeter meter(progress, part_work(waiting, lists, static_cast<uint32_t>(spec()[kIters])));
    growth->change = lists_->with_parts(train(
        keys, trained, keys.tokens, rounded_share(waiting, segment), lists, rope_, scale, meter));
    return growth;
  }
  ProgressMeter meter(progress, static_cast<double>(keys.tokens - count()));
  std::vector<uint32_t> labels = lists_->tail_labels();
  const std::vector<uint32_t> more = assign(keys, count(), keys.tokens, meter);
  labels.insert(labels.end(), more.begin(), more.end());
  growth->change = lists_->with_tail(keys, std::move(labels));
  return growth;
}

void IvfIndex::do_commit(Addition& addition) {
  auto& growth = static_cast<IvfGrowth&>(addition);
  if (growth.first != nullptr) {
    std::swap(lists_, growth.first->lists_);
    rows_per_list_ = growth.first->rows_per_list_;
  } else {
    lists_.own().apply(std::move(growth.change));
  }
}

void IvfIndex::find(const SearchArgs& args, ListScratch& scratch, SearchCost& cost) const {
  scratch.reserve(dim(), lists_->count());
  ListRanking& ranking = scratch.ranking;
  const RowsView means = lists_->means();
  const float* queries = rope_.queries(args, count(), scratch.queries.data());
  cpu::score_rows(kernels(), means, queries, args.group, nullptr, means.tokens, ranking.scores(),
                  ranking.stride());
  cost.bytes_read += means.tokens * means.row_bytes();
  const auto is_empty = [this](size_t l) { return lists_->size(l) == 0; };
  // Every part ranks all lists, which is cheap against scanning the best; they deal them out in turn.
  const auto chosen = ranking.best(args.group, lists_->count(), probe(), is_empty);
  lists_->scan(chosen, args, keys(), scratch, cost);
}

void IvfIndex::describe(IndexInfo& info) const {
  lists_->describe(info);
  if (count() == 0) return;
  Spec effective = spec();
  if (spec()[kC] == 0) effective.set(kC, static_cast<int64_t>(lists_->count()));
  if (spec()[kProbe] == 0) effective.set(kProbe, static_cast<int64_t>(probe()));
  info.params = effective.text();
}

void IvfIndex::save_body(Writer& out) const {
  out.put(static_cast<uint64_t>(rows_per_list_));
  rope_.save(out);
  lists_->save(out);
}

void IvfIndex::load_body(Reader& in, const RowsView& keys) {
  const auto rows_per_list = in.get<uint64_t>();
  require_sound(rows_per_list >= 1 && rows_per_list <= kMaxRows, "an impossible list length");
  RopeUndo rope = RopeUndo::load(in, dim());
  IvfLists lists(kernels(), dim(), dtype(), true, coded());
  lists.load(in, keys);
  in.finish();
  lists_ = cpu::Shared(std::move(lists));
  rope_ = std::move(rope);
  rows_per_list_ = rows_per_list;
}

}  // namespace

const TypeDecl kIvfType = {
    "ivf", "partitions by k-means, the best ones scanned for the whole group", kParams};

std::unique_ptr<Index> make_ivf(const Spec& spec, uint32_t dim, DType dtype,
                                const Context& context) {
  return std::make_unique<IvfIndex>(spec, dim, dtype, context);
}

size_t estimate_ivf(const Spec& spec, size_t count, uint32_t dim, DType dtype) {
  if (count == 0) return 0;
  const size_t lists = lists_of_build(spec, count);
  return IvfLists::estimate(count, lists, dim, dtype, spec[kCodec] == kInt8);
}

}  // namespace keyhole::index
