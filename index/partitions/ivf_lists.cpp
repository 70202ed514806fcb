#include "index/partitions/ivf_lists.h"

#include <algorithm>
#include <iterator>

#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr size_t kMaxListsOfPart = size_t{1} << 24;

void add_lists(const std::vector<Part>& parts, std::vector<KeyList>& lists) {
  for (const Part& part : parts) {
    for (size_t l = 0; l < part.lists.count(); ++l) lists.push_back(part.lists.list(l));
  }
}

bool all_below(const std::vector<uint32_t>& labels, size_t lists) {
  return std::all_of(labels.begin(), labels.end(), [&](uint32_t l) { return l < lists; });
}

}  // namespace

IvfLists::Change IvfLists::with_parts(std::vector<Part> parts) const {
  Change change;
  change.means = means_;
  for (Part& part : parts) {
    const size_t offset = change.means.size();
    change.means.resize(offset + part.centroids.size() * dtype_size(dtype_));
    kernels_->from_f32[static_cast<size_t>(dtype_)](
        part.centroids.data(), change.means.data() + offset, part.centroids.size());
    part.centroids = {};
    part.lists = in_codec(std::move(part.lists));
  }
  change.trained = trained_;
  add_lists(parts, change.trained);  // lists stay where they are when their part is moved
  change.tail = KeyLists(change.trained.size());
  change.parts = std::move(parts);
  return change;
}

IvfLists::Change IvfLists::with_tail(const RowsView& keys, std::vector<uint32_t> labels) const {
  Change change;
  change.means = means_;
  change.trained = trained_;
  change.tail = in_codec(KeyLists(*kernels_, dtype_, keys, trained_rows(), labels, count()));
  change.tail_labels = std::move(labels);
  return change;
}

void IvfLists::apply(Change&& change) {
  parts_.reserve(parts_.size() + change.parts.size());
  std::move(change.parts.begin(), change.parts.end(), std::back_inserter(parts_));
  std::swap(means_, change.means);
  std::swap(trained_, change.trained);
  std::swap(tail_, change.tail);
  std::swap(tail_labels_, change.tail_labels);
}

void IvfLists::scan(std::span<const uint32_t> lists, const SearchArgs& args, const RowsView& keys,
                    ListScratch& scratch, SearchCost& cost) const {
  if (coded_) scratch.rerank.begin(codes_, args, keys.tokens, scratch.collector);
  for (size_t i = args.part; i < lists.size(); i += args.parts) {
    scan(trained_[lists[i]], args, scratch, cost);
    scan(tail_.list(lists[i]), args, scratch, cost);
  }
  if (coded_) scratch.rerank.finish(*kernels_, keys, args, cost);
}

void IvfLists::scan(const KeyList& list, const SearchArgs& args, ListScratch& scratch,
                    SearchCost& cost) const {
  float* scores = scratch.scores.data();
  const size_t bytes = coded_ ? codes_.stride() : row_bytes();
  for (uint32_t first = 0; first < list.size; first += kScanBlock) {
    const size_t n = std::min<size_t>(kScanBlock, list.size - first);
    const std::byte* keys = list.keys + first * bytes;
    if (coded_) {
      codes_.score(scratch.rerank.queries(), reinterpret_cast<const int8_t*>(keys), nullptr, n,
                   scores, kScanBlock);
      scratch.rerank.offer(scores, kScanBlock, list.rows + first, n);
      continue;
    }
    cpu::score_rows(*kernels_, dense_rows(keys, n, dim_, dtype_), args.queries, args.group, nullptr,
                    n, scores, kScanBlock);
    scratch.collector.offer(scores, kScanBlock, list.rows + first, n);
  }
  cost.keys_scored += uint64_t{args.group} * list.size;
  cost.bytes_read += list.size * bytes;
}

void IvfLists::truncate(size_t rows) {
  if (rows >= trained_rows()) {
    tail_.truncate(rows);
    tail_labels_.resize(std::min(tail_labels_.size(), rows - trained_rows()));
    return;
  }
  std::vector<KeyList> trained;
  trained.reserve(trained_.size());
  while (!parts_.empty() && parts_.back().begin >= rows) parts_.pop_back();
  if (!parts_.empty()) {
    parts_.back().end = rows;
    parts_.back().lists.truncate(rows);
  }
  add_lists(parts_, trained);
  trained_ = std::move(trained);
  means_.resize(count() * mean_bytes_);
  tail_ = KeyLists(count());
  tail_labels_.clear();
}

bool IvfLists::has_parts_of(size_t lists) const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [lists](const Part& part) { return part.lists.count() == lists; });
}

size_t IvfLists::bytes() const {
  size_t bytes = means_.capacity() + trained_.capacity() * sizeof(KeyList) + tail_.bytes() +
                 tail_labels_.capacity() * sizeof(uint32_t);
  for (const Part& part : parts_) bytes += part.lists.bytes();
  return bytes;
}

size_t IvfLists::bytes_of_others() const {
  size_t bytes = tail_.bytes_of_others();
  for (const Part& part : parts_) bytes += part.lists.bytes_of_others();
  return bytes;
}

size_t IvfLists::estimate(size_t rows, size_t lists, uint32_t dim, DType dtype, bool coded) {
  const size_t row_bytes = dim * dtype_size(dtype);
  return KeyLists::estimate(rows, lists, coded ? dim : row_bytes) +
         KeyLists::estimate(0, lists, row_bytes) + lists * (row_bytes + sizeof(KeyList));
}

void IvfLists::describe(IndexInfo& info) const {
  double rows = 0.0;
  double smallest = count() > 0 ? static_cast<double>(size(0)) : 0.0;
  double largest = 0.0;
  double squares = 0.0;
  for (size_t l = 0; l < count(); ++l) {
    const auto length = static_cast<double>(size(l));
    rows += length;
    smallest = std::min(smallest, length);
    largest = std::max(largest, length);
    squares += length * length;
  }
  const auto lists = static_cast<double>(count());
  info.diagnostics = {{"lists", lists},
                      {"list_size_min", smallest},
                      {"list_size_mean", lists > 0 ? rows / lists : 0.0},
                      {"list_size_max", largest},
                      // Faiss's imbalance factor: 1 where all lists are equally long.
                      {"imbalance", rows > 0 ? squares * lists / (rows * rows) : 0.0},
                      {"parts", static_cast<double>(parts_.size())},
                      {"tail_rows", static_cast<double>(tail_labels_.size())}};
}

void IvfLists::save(Writer& out) const {
  out.put(static_cast<uint64_t>(parts_.size()));
  if (coded_ && !parts_.empty()) codes_.save(out);
  const std::byte* means = means_.data();
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
    out.put_array(means, part.lists.count() * mean_bytes_);
    out.put_array(labels.data(), labels.size());
    means += part.lists.count() * mean_bytes_;
  }
  out.put_array(tail_labels_.data(), tail_labels_.size());
}

void IvfLists::load(Reader& in, const RowsView& keys) {
  const auto part_count = in.get<uint64_t>();
  require_sound(part_count <= keys.tokens, "more parts than rows");
  require_sound((part_count == 0) == (keys.tokens == 0), "rows without lists");
  if (coded_ && part_count > 0) codes_.load_scales(in);
  for (uint64_t p = 0; p < part_count; ++p) {
    Part part;
    part.begin = trained_rows();
    part.end = in.get<uint64_t>();
    require_sound(part.end > part.begin && part.end <= keys.tokens,
                  "parts that do not follow each other");
    const auto lists = in.get<uint64_t>();
    require_sound(lists >= 1 && lists <= kMaxListsOfPart, "an impossible number of lists");
    const auto means = in.get_array<std::byte>(lists * mean_bytes_);
    require_sound(kernels_->all_finite[static_cast<size_t>(dtype_)](
                      means.data(), means.size() / dtype_size(dtype_)),
                  "a mean key that is not finite");
    means_.insert(means_.end(), means.begin(), means.end());
    const auto labels = in.get_array<uint32_t>(part.end - part.begin);
    require_sound(all_below(labels, lists), "a row of a list that does not exist");
    part.lists = in_codec(KeyLists(*kernels_, dtype_, keys, part.begin, labels, lists));
    parts_.push_back(std::move(part));
  }
  add_lists(parts_, trained_);
  auto tail_labels = in.get_array<uint32_t>(keys.tokens - trained_rows());
  require_sound(all_below(tail_labels, count()), "a row of a list that does not exist");
  apply(with_tail(keys, std::move(tail_labels)));
}

}  // namespace keyhole::index
