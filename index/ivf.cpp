#include "index/ivf.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "index/ivf_train.h"
#include "index/list_ranking.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kC, kProbe, kTrain, kSegment, kIters, kMetric, kCenter, kSeed };
enum Train : int64_t { kGlobal, kSegmented };

constexpr size_t kMaxLists = size_t{1} << 24;
constexpr std::string_view kTrainOptions[] = {"global", "segmented"};
constexpr std::string_view kMetricOptions[] = {"l2", "ip"};

constexpr ParamDecl kParams[] = {
    {"C", Stage::build, 0, 0, kMaxLists, {}, "partitions; 0: one per 64 keys"},
    {"probe",
     Stage::search,
     0,
     0,
     kMaxLists,
     {},
     "partitions that a search scans for the whole group; 0: an eighth of all"},
    {"train", Stage::build, kSegmented, 0, 0, kTrainOptions,
     "k-means over all keys at once, or over segments of the text apart (takes segment/keys of the "
     "time)"},
    {"segment",
     Stage::build,
     8192,
     64,
     1 << 24,
     {},
     "keys per segment; appended keys are clustered once this many have come in"},
    {"iters", Stage::build, 10, 1, 1000, {}, "k-means iterations"},
    {"metric", Stage::build, 0, 0, 0, kMetricOptions,
     "k-means by L2 distance, or spherical k-means by inner product"},
    {"center",
     Stage::build,
     1,
     0,
     1,
     {},
     "1: cluster the keys minus their mean (no softmax changes by it)"},
    {"seed", Stage::build, 1234, 0, 2147483647, {}, "of the k-means start"},
};

constexpr size_t kKeysPerList = 64;
constexpr size_t kAutoProbeShare = 8;
// Keeps an explicit C on a short build from fixing tiny lists for all rows to come.
constexpr size_t kLeastKeysPerAppendedList = 16;

size_t rounded_share(size_t n, size_t per) { return std::max<size_t>((n + per / 2) / per, 1); }

size_t lists_of_build(const Spec& spec, size_t rows) {
  const auto lists = static_cast<size_t>(spec[kC]);
  return lists != 0 ? std::min(lists, rows) : rounded_share(rows, kKeysPerList);
}

// Piece i of n divided into `pieces` nearly equal ones begins here.
size_t piece(size_t n, size_t pieces, size_t i) { return n * i / pieces; }

struct IvfScratch final : SearchScratch {
  using SearchScratch::SearchScratch;
  ListRanking ranking;
};

class IvfIndex final : public BasicIndex {
 public:
  using BasicIndex::BasicIndex;

  [[nodiscard]] std::unique_ptr<Scratch> make_scratch(uint32_t max_group,
                                                      uint32_t max_k) const override {
    auto scratch = std::make_unique<IvfScratch>(max_group, max_k);
    scratch->top.begin(max_group, max_k, count());
    scratch->ranking.reserve(max_group, lists());
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
  [[nodiscard]] size_t lists() const { return trained_lists_.size(); }
  [[nodiscard]] size_t trained_rows() const { return parts_.empty() ? 0 : parts_.back().end; }
  [[nodiscard]] size_t centroid_bytes() const { return lists() * row_bytes(); }
  [[nodiscard]] size_t probe() const {
    const auto asked = static_cast<size_t>(spec()[kProbe]);
    return asked != 0 ? std::min(asked, lists()) : rounded_share(lists(), kAutoProbeShare);
  }

  /// Rows [begin, end) clustered in `segments` parts of nearly equal size.
  [[nodiscard]] std::vector<Part> train(const RowsView& keys, size_t begin, size_t end,
                                        size_t segments, size_t lists, ProgressMeter& meter) const;
  /// The lists of rows [begin, end) by the nearest of `centroids` (packed).
  [[nodiscard]] std::vector<uint32_t> assign(const std::vector<std::byte>& centroids,
                                             const RowsView& keys, size_t begin, size_t end,
                                             ProgressMeter& meter) const;
  void add_centroids(const std::vector<Part>& parts, std::vector<std::byte>& packed) const;
  static void add_lists(const std::vector<Part>& parts, std::vector<KeyList>& lists);
  void scan(const KeyList& list, const float* queries, uint32_t group, SearchScratch& scratch,
            Hits& hits) const;

  std::vector<Part> parts_;              // rows [0, trained_rows()) in order; centroids live below
  std::vector<std::byte> centroids_;     // `[lists, dim]` of the keys' dtype, all parts in order
  std::vector<KeyList> trained_lists_;   // of all parts in order
  KeyLists tail_;                        // rows [trained_rows(), count()), over the same lists
  std::vector<uint32_t> tail_labels_;    // list of each of these rows
  size_t rows_per_list_ = kKeysPerList;  // what appended parts aim at
};

std::vector<Part> IvfIndex::train(const RowsView& keys, size_t begin, size_t end, size_t segments,
                                  size_t lists, ProgressMeter& meter) const {
  const PartConfig config = {
      .iterations = static_cast<uint32_t>(spec()[kIters]),
      .nearness = spec()[kMetric] == 0 ? Nearness::l2 : Nearness::inner_product,
      .center = spec()[kCenter] != 0,
      .seed = static_cast<uint32_t>(spec()[kSeed])};
  const size_t n = end - begin;
  segments = std::min(segments, lists);
  std::vector<Part> parts(segments);
  const auto train_one = [&](uint32_t i, uint32_t) {
    const size_t b = begin + piece(n, segments, i);
    const size_t e = begin + piece(n, segments, i + 1);
    const size_t share = piece(lists, segments, i + 1) - piece(lists, segments, i);
    parts[i] = train_part(context(), keys, b, e, std::min(share, e - b), config, meter);
  };
  if (context().pool != nullptr) {
    context().pool->run(static_cast<uint32_t>(segments), train_one);
  } else {
    for (uint32_t i = 0; i < segments; ++i) train_one(i, 0);
  }
  return parts;
}

std::vector<uint32_t> IvfIndex::assign(const std::vector<std::byte>& centroids,
                                       const RowsView& keys, size_t begin, size_t end,
                                       ProgressMeter& meter) const {
  std::vector<uint32_t> labels(end - begin);
  if (labels.empty()) return labels;
  const size_t lists = centroids.size() / row_bytes();
  const RowsView packed = {centroids.data(), row_bytes(), lists, dim(), dtype()};
  const std::vector<float> means = rows_as_f32(kernels(), packed, 0, lists);
  const std::vector<float> points = rows_as_f32(kernels(), keys, begin, end);
  NearestCentroid nearest(kernels(), Nearness::l2, dim());
  nearest.set(means.data(), lists);
  assign_points(nearest, context().pool, points.data(), labels.size(), dim(), labels.data(), meter);
  return labels;
}

// In the keys' dtype: rounding them moves no rank that matters, and at 64 keys a list fp32 ones would be
// 3 % of K, a good part of what a search reads.
void IvfIndex::add_centroids(const std::vector<Part>& parts, std::vector<std::byte>& packed) const {
  for (const Part& part : parts) {
    const size_t offset = packed.size();
    packed.resize(offset + part.centroids.size() * dtype_size(dtype()));
    kernels().from_f32[static_cast<size_t>(dtype())](part.centroids.data(), packed.data() + offset,
                                                     part.centroids.size());
  }
}

void IvfIndex::add_lists(const std::vector<Part>& parts, std::vector<KeyList>& lists) {
  for (const Part& part : parts) {
    for (size_t l = 0; l < part.lists.count(); ++l) lists.push_back(part.lists.list(l));
  }
}

void IvfIndex::do_build(const BuildInput& input, const Progress& progress) {
  const size_t n = input.keys.count;
  std::vector<Part> parts;
  std::vector<std::byte> centroids;
  std::vector<KeyList> trained;
  size_t rows_per_list = kKeysPerList;
  if (n > 0) {
    const size_t lists = lists_of_build(spec(), n);
    const size_t segments =
        spec()[kTrain] == kGlobal ? 1 : rounded_share(n, static_cast<size_t>(spec()[kSegment]));
    ProgressMeter meter(progress, part_work(n, lists, static_cast<uint32_t>(spec()[kIters])));
    parts = train(input.keys, 0, n, segments, lists, meter);
    if (spec()[kC] != 0) rows_per_list = std::max(n / lists, kLeastKeysPerAppendedList);
  }
  add_centroids(parts, centroids);
  add_lists(parts, trained);
  for (Part& part : parts) part.centroids = {};
  KeyLists tail(input.keys, n, {}, trained.size());

  parts_ = std::move(parts);
  centroids_ = std::move(centroids);
  trained_lists_ = std::move(trained);
  tail_ = std::move(tail);
  tail_labels_.clear();
  rows_per_list_ = rows_per_list;
}

void IvfIndex::do_append(const RowsView& keys, const Progress& progress) {
  const size_t n = keys.count;
  if (parts_.empty()) {
    BuildInput input;
    input.keys = keys;
    return do_build(input, progress);
  }
  // Untrained rows are few against a segment, and against the trained ones: after a short build the parts
  // double until they have the length of a segment.
  const size_t waiting = n - trained_rows();
  const auto segment = static_cast<size_t>(spec()[kSegment]);
  const bool ripe = waiting >= std::min(segment, trained_rows());
  const size_t new_lists = ripe ? std::min(rounded_share(waiting, rows_per_list_), waiting) : 0;
  ProgressMeter meter(progress,
                      ripe ? part_work(waiting, new_lists, static_cast<uint32_t>(spec()[kIters]))
                           : static_cast<double>(n - count()));
  std::vector<Part> parts;
  std::vector<std::byte> centroids = centroids_;
  std::vector<KeyList> trained = trained_lists_;
  std::vector<uint32_t> labels;
  size_t tail_begin = trained_rows();
  if (ripe) {
    parts = train(keys, trained_rows(), n, rounded_share(waiting, segment), new_lists, meter);
    add_centroids(parts, centroids);
    add_lists(parts, trained);
    for (Part& part : parts) part.centroids = {};
    tail_begin = n;
  } else {
    labels = tail_labels_;
    const std::vector<uint32_t> more = assign(centroids, keys, count(), n, meter);
    labels.insert(labels.end(), more.begin(), more.end());
  }
  KeyLists tail(keys, tail_begin, labels, trained.size());
  parts_.reserve(parts_.size() + parts.size());

  for (Part& part : parts) parts_.push_back(std::move(part));
  centroids_ = std::move(centroids);
  trained_lists_ = std::move(trained);
  tail_ = std::move(tail);
  tail_labels_ = std::move(labels);
}

void IvfIndex::do_truncate(size_t new_count) {
  if (new_count >= trained_rows()) {
    tail_.truncate(new_count);
    tail_labels_.resize(new_count - trained_rows());
    return;
  }
  while (!parts_.empty() && parts_.back().begin >= new_count) parts_.pop_back();
  if (!parts_.empty()) {
    parts_.back().end = new_count;
    parts_.back().lists.truncate(new_count);
  }
  trained_lists_.clear();
  add_lists(parts_, trained_lists_);
  centroids_.resize(centroid_bytes());
  tail_ = KeyLists(keys(), new_count, {}, lists());
  tail_labels_.clear();
}

void IvfIndex::scan(const KeyList& list, const float* queries, uint32_t group,
                    SearchScratch& scratch, Hits& hits) const {
  for (uint32_t first = 0; first < list.size; first += kScanBlock) {
    const size_t n = std::min<size_t>(kScanBlock, list.size - first);
    kernels().score[static_cast<size_t>(dtype())]({.queries = queries,
                                                   .group = group,
                                                   .dim = dim(),
                                                   .keys = list.keys + first * row_bytes(),
                                                   .key_stride = row_bytes(),
                                                   .ids = nullptr,
                                                   .count = n,
                                                   .scores = scratch.scores.data(),
                                                   .score_stride = kScanBlock});
    for (uint32_t h = 0; h < group; ++h) {
      scratch.top.offer(h, scratch.scores.data() + h * kScanBlock, list.rows + first, n);
    }
  }
  hits.keys_scored += uint64_t{group} * list.size;
  hits.bytes_read += list.size * row_bytes();
}

void IvfIndex::do_search(const float* queries, uint32_t group, uint32_t, SearchScratch& base,
                         Hits& hits) const {
  auto* scratch = dynamic_cast<IvfScratch*>(&base);
  if (scratch == nullptr) {
    throw Error(Status::invalid_argument, "search of an ivf index with another type's scratch");
  }
  ListRanking& ranking = scratch->ranking;
  ranking.reserve(scratch->max_group, lists());
  kernels().score[static_cast<size_t>(dtype())]({.queries = queries,
                                                 .group = group,
                                                 .dim = dim(),
                                                 .keys = centroids_.data(),
                                                 .key_stride = row_bytes(),
                                                 .ids = nullptr,
                                                 .count = lists(),
                                                 .scores = ranking.scores(),
                                                 .score_stride = ranking.stride()});
  hits.bytes_read += centroid_bytes();
  const auto is_empty = [this](size_t l) {
    return trained_lists_[l].size == 0 && tail_.list(l).size == 0;
  };
  for (const uint32_t l : ranking.best(group, lists(), probe(), is_empty)) {
    scan(trained_lists_[l], queries, group, *scratch, hits);
    scan(tail_.list(l), queries, group, *scratch, hits);
  }
}

void IvfIndex::describe(IndexInfo& info) const {
  info.bytes = centroids_.capacity() + trained_lists_.capacity() * sizeof(KeyList) + tail_.bytes() +
               tail_labels_.capacity() * sizeof(uint32_t);
  for (const Part& part : parts_) info.bytes += part.lists.bytes();

  Spec effective = spec();
  if (spec()[kC] == 0 && count() > 0) effective.set(kC, static_cast<int64_t>(lists()));
  if (spec()[kProbe] == 0 && count() > 0) effective.set(kProbe, static_cast<int64_t>(probe()));
  info.params = effective.text();

  double smallest = 0.0;
  double largest = 0.0;
  double squares = 0.0;
  for (size_t l = 0; l < lists(); ++l) {
    const double size = trained_lists_[l].size + tail_.list(l).size;
    smallest = l == 0 ? size : std::min(smallest, size);
    largest = std::max(largest, size);
    squares += size * size;
  }
  const auto rows = static_cast<double>(count());
  const auto number = static_cast<double>(lists());
  info.diagnostics = {
      {"lists", number},
      {"list_size_min", smallest},
      {"list_size_mean", number > 0 ? rows / number : 0.0},
      {"list_size_max", largest},
      // Faiss's factor: 1 when all lists are equal; the scan of a row's own list is so many
      // times the mean.
      {"imbalance", rows > 0 ? squares * number / (rows * rows) : 0.0},
      {"parts", static_cast<double>(parts_.size())},
      {"tail_rows", static_cast<double>(tail_labels_.size())}};
}

void IvfIndex::save_body(Writer& out) const {
  out.put(static_cast<uint64_t>(rows_per_list_));
  out.put(static_cast<uint64_t>(parts_.size()));
  const std::byte* centroids = centroids_.data();
  for (const Part& part : parts_) {
    std::vector<uint32_t> labels(part.end - part.begin);
    for (size_t l = 0; l < part.lists.count(); ++l) {
      const KeyList list = part.lists.list(l);
      for (uint32_t i = 0; i < list.size; ++i) {
        labels[list.rows[i] - part.begin] = static_cast<uint32_t>(l);
      }
    }
    out.put(static_cast<uint64_t>(part.end));
    out.put(static_cast<uint64_t>(part.lists.count()));
    out.put_array(centroids, part.lists.count() * row_bytes());
    out.put_array(labels.data(), labels.size());
    centroids += part.lists.count() * row_bytes();
  }
  out.put_array(tail_labels_.data(), tail_labels_.size());
}

void IvfIndex::load_body(Reader& in, const RowsView& keys) {
  const auto all_below = [](const std::vector<uint32_t>& labels, size_t lists) {
    return std::all_of(labels.begin(), labels.end(), [&](uint32_t l) { return l < lists; });
  };
  const auto rows_per_list = in.get<uint64_t>();
  require_sound(rows_per_list >= 1 && rows_per_list <= kMaxRows, "an impossible list length");
  const auto part_count = in.get<uint64_t>();
  require_sound(part_count <= keys.count, "more parts than rows");
  std::vector<Part> parts;
  std::vector<std::byte> centroids;
  const auto all_finite = kernels().all_finite[static_cast<size_t>(dtype())];
  for (size_t begin = 0; parts.size() < part_count; begin = parts.back().end) {
    Part part;
    part.begin = begin;
    part.end = in.get<uint64_t>();
    require_sound(part.end > begin && part.end <= keys.count,
                  "parts that do not follow each other");
    const auto lists = in.get<uint64_t>();
    require_sound(lists >= 1 && lists <= kMaxLists, "an impossible number of lists");
    const auto means = in.get_array<std::byte>(lists * row_bytes());
    require_sound(all_finite(means.data(), lists * dim()), "a mean key that is not finite");
    centroids.insert(centroids.end(), means.begin(), means.end());
    const auto labels = in.get_array<uint32_t>(part.end - begin);
    require_sound(all_below(labels, lists), "a row of a list that does not exist");
    part.lists = KeyLists(keys, begin, labels, lists);
    parts.push_back(std::move(part));
  }
  const size_t trained = parts.empty() ? 0 : parts.back().end;
  require_sound(parts.empty() == (keys.count == 0), "rows without lists");
  const size_t list_count = centroids.size() / row_bytes();
  auto tail_labels = in.get_array<uint32_t>(keys.count - trained);
  require_sound(all_below(tail_labels, list_count), "a row of a list that does not exist");
  KeyLists tail(keys, trained, tail_labels, list_count);
  std::vector<KeyList> trained_lists;
  add_lists(parts, trained_lists);
  in.finish();

  parts_ = std::move(parts);
  centroids_ = std::move(centroids);
  trained_lists_ = std::move(trained_lists);
  tail_ = std::move(tail);
  tail_labels_ = std::move(tail_labels);
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
  const size_t row_bytes = dim * dtype_size(dtype);
  return KeyLists::estimate(count, lists, row_bytes) + KeyLists::estimate(0, lists, row_bytes) +
         lists * (row_bytes + sizeof(KeyList));
}

}  // namespace keyhole::index
