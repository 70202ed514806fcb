#include "index/tail/tail_tree.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "index/grow.h"
#include "index/progress.h"
#include "index/scan/balance.h"
#include "index/tail/tail_cluster.h"

namespace keyhole::index {
namespace {

// k-means in segments costs a tenth of a global one at the same number of partitions, and keys near in time
// are near in space anyway.
constexpr size_t kSegmentRows = 8192;

void make_level_room(TailLevel& to, const TailLevel& more) {
  make_room(to.sizes, more.sizes.size());
  make_room(to.variances, more.variances.size());
  make_room(to.keys, more.keys.size());
  make_room(to.values, more.values.size());
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

void append(TailLevel& to, const TailLevel& from) {
  append(to.sizes, from.sizes);
  append(to.variances, from.variances);
  append(to.keys, from.keys);
  append(to.values, from.values);
}

void cut(TailLevel& level, size_t count, uint32_t dim, DType dtype) {
  level.sizes.resize(count);
  level.variances.resize(count);
  level.keys.resize(count * dim);
  level.values.resize(count * dim * dtype_size(dtype));
}

std::vector<float> learned_scale(const cpu::Kernels& kernels, const RowsView& keys) {
  return learn_balance(kernels, {.keys = keys, .values = {}}, {}).key_scale;
}

class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(&sum) {}
  ~Stopwatch() {
    *sum_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double* sum_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

TailTree::TailTree(const Context& context, uint32_t dim, DType dtype, const TailParams& params,
                   std::vector<float> key_scale)
    : context_(context),
      dim_(dim),
      dtype_(dtype),
      params_(params),
      given_scale_(std::move(key_scale)),
      codes_(*context.kernels, dim),
      mean_value_(dim, 0.0F) {
  set_scale(given_scale_);
}

void TailTree::set_scale(std::vector<float> key_scale) {
  std::vector<float> query_scale(dim_, 1.0F);
  for (size_t j = 0; j < key_scale.size(); ++j) query_scale[j] = 1.0F / key_scale[j];
  key_scale_ = std::move(key_scale);
  query_scale_ = std::move(query_scale);
}

TailSegment TailTree::cluster(const KvView& kv, size_t begin, size_t end,
                              const Progress& progress) const {
  return summarise(*context_.kernels, kv, begin,
                   cluster_rows(context_, kv.keys, begin, end, key_scale_, params_, progress),
                   codes_, key_scale_, dtype_);
}

void TailTree::build(const KvView& kv, const Progress& progress) {
  TailTree next(context_, dim_, dtype_, params_, given_scale_);
  next.build_seconds_ = build_seconds_;
  {
    const Stopwatch watch(next.build_seconds_);
    const size_t n = kv.keys.tokens;
    if (n != 0 && given_scale_.empty()) next.set_scale(learned_scale(*context_.kernels, kv.keys));
    next.codes_.learn(kv.keys);
    const size_t segments = (n + kSegmentRows - 1) / kSegmentRows;
    std::vector<TailSegment> parts(segments);
    ProgressMeter meter(progress, static_cast<double>(segments));
    const auto build_one = [&](uint32_t i, uint32_t) {
      parts[i] = next.cluster(kv, n * i / segments, n * (i + 1) / segments, {});
      meter.advance(1.0);
    };
    cpu::run_on(context_.pool, segments, build_one);
    for (const TailSegment& part : parts) next.add(part);
    next.update_values();
  }
  *this = std::move(next);
}

std::unique_ptr<TailSegment> TailTree::prepare_append(const KvView& kv,
                                                      const Progress& progress) const {
  if (count() != 0) {
    return std::make_unique<TailSegment>(cluster(kv, count(), kv.keys.tokens, progress));
  }
  // Nothing is encoded yet: the first rows say what centre and scales are.
  KeyCodes codes(*context_.kernels, dim_);
  codes.learn(kv.keys);
  const bool has_scale = !key_scale_.empty() || kv.keys.tokens == 0;
  std::vector<float> scale = has_scale ? key_scale_ : learned_scale(*context_.kernels, kv.keys);
  auto segment = std::make_unique<TailSegment>(
      summarise(*context_.kernels, kv, 0,
                cluster_rows(context_, kv.keys, 0, kv.keys.tokens, scale, params_, progress), codes,
                scale, dtype_));
  segment->codes = std::move(codes);
  if (!has_scale) segment->key_scale = std::move(scale);
  return segment;
}

void TailTree::make_room(const TailSegment& segment) {
  index::make_room(segments_, 1);
  make_level_room(coarse_, segment.coarse);
  make_level_room(fine_, segment.fine);
  index::make_room(fine_begin_, segment.fine_begin.size());
  index::make_room(row_begin_, segment.row_begin.size());
  index::make_room(rows_, segment.rows.size());
  index::make_room(parents_, segment.parents.size());
  index::make_room(fine_of_, segment.fine_of.size());
}

void TailTree::commit_append(const TailSegment& segment) {
  make_room(segment);
  if (segment.codes) codes_.learn_from(*segment.codes);
  if (!segment.key_scale.empty()) set_scale(segment.key_scale);
  add(segment);
  update_values();
}

void TailTree::add(const TailSegment& segment) {
  if (segment.rows.empty()) return;
  const size_t begin = count();
  const auto coarse = static_cast<uint32_t>(coarse_.count());
  const auto fine = static_cast<uint32_t>(fine_.count());
  segments_.push_back({begin, begin + segment.rows.size(), coarse, fine, segment.square_values});
  append(coarse_, segment.coarse);
  append(fine_, segment.fine);
  for (size_t c = 1; c < segment.fine_begin.size(); ++c) {
    fine_begin_.push_back(fine + segment.fine_begin[c]);
  }
  const auto first = static_cast<uint32_t>(begin);
  for (size_t f = 1; f < segment.row_begin.size(); ++f) {
    row_begin_.push_back(first + segment.row_begin[f]);
  }
  append(rows_, segment.rows);
  for (const uint32_t p : segment.parents) parents_.push_back(coarse + p);
  for (const uint32_t f : segment.fine_of) fine_of_.push_back(fine + f);
}

void TailTree::drop_last_segment() {
  const Segment& s = segments_.back();
  cut(coarse_, s.coarse, dim_, dtype_);
  cut(fine_, s.fine, dim_, dtype_);
  fine_begin_.resize(s.coarse + 1);
  row_begin_.resize(s.fine + 1);
  parents_.resize(s.fine);
  rows_.resize(s.begin);
  fine_of_.resize(s.begin);
  segments_.pop_back();
}

void TailTree::truncate(size_t count, const KvView& kv) {
  if (count >= this->count()) return;
  while (!segments_.empty() && segments_.back().begin >= count) drop_last_segment();
  if (!segments_.empty() && segments_.back().end > count) {
    const Segment last = segments_.back();
    TailLabels labels;
    labels.coarse = coarse_.count() - last.coarse;
    for (size_t row = last.begin; row < count; ++row) {
      labels.fine_of.push_back(fine_of_[row] - static_cast<uint32_t>(last.fine));
    }
    for (size_t f = last.fine; f < fine_.count(); ++f) {
      labels.parents.push_back(parents_[f] - static_cast<uint32_t>(last.coarse));
    }
    const TailSegment rest =
        summarise(*context_.kernels, kv, last.begin, labels, codes_, key_scale_, dtype_);
    drop_last_segment();
    add(rest);
  }
  if (segments_.empty()) set_scale(given_scale_);
  update_values();
}

void TailTree::update_values() {
  double sum[kMaxHeadDim] = {};
  float value[kMaxHeadDim];
  const size_t row_bytes = dim_ * dtype_size(dtype_);
  for (size_t c = 0; c < coarse_.count(); ++c) {
    context_.kernels->to_f32[static_cast<size_t>(dtype_)](coarse_.values.data() + c * row_bytes,
                                                          value, dim_);
    for (uint32_t j = 0; j < dim_; ++j) sum[j] += double{coarse_.sizes[c]} * value[j];
  }
  const double n = std::max<double>(static_cast<double>(count()), 1.0);
  double squares = 0.0;
  for (const Segment& s : segments_) squares += s.square_values;
  double square_mean = 0.0;
  for (uint32_t j = 0; j < dim_; ++j) {
    mean_value_[j] = static_cast<float>(sum[j] / n);
    square_mean += sum[j] / n * (sum[j] / n);
  }
  value_spread_ = static_cast<float>(std::min(std::max(squares / n - square_mean, 0.0), 1e30));
}

size_t TailTree::bytes() const {
  return coarse_.bytes() + fine_.bytes() +
         (fine_begin_.size() + row_begin_.size() + rows_.size() + parents_.size() +
          fine_of_.size()) *
             sizeof(uint32_t);
}

size_t TailTree::estimate(size_t rows, uint32_t dim, DType dtype, const TailParams& params) {
  const size_t partition = 2 * sizeof(float) + 2 * sizeof(uint32_t) + dim * (1 + dtype_size(dtype));
  const size_t partitions = rows / params.keys_per_partition + rows / coarse_partition_keys(params);
  return partitions * partition + 2 * rows * sizeof(uint32_t);
}

void TailTree::save(Writer& out) const {
  out.put(params_.keys_per_partition);
  out.put(static_cast<uint64_t>(segments_.size()));
  if (segments_.empty()) return;
  out.put(static_cast<uint32_t>(key_scale_.size()));
  out.put_array(key_scale_.data(), key_scale_.size());
  codes_.save(out);
  for (const Segment& s : segments_) {
    out.put(static_cast<uint64_t>(s.begin));
    out.put(static_cast<uint64_t>(s.coarse));
    out.put(static_cast<uint64_t>(s.fine));
    out.put(s.square_values);
  }
  out.put(static_cast<uint64_t>(coarse_.count()));
  out.put(static_cast<uint64_t>(fine_.count()));
  const auto put_level = [&](const TailLevel& level) {
    out.put_array(level.variances.data(), level.variances.size());
    out.put_array(level.keys.data(), level.keys.size());
    out.put_array(level.values.data(), level.values.size());
  };
  put_level(coarse_);
  put_level(fine_);
  out.put_array(parents_.data(), parents_.size());
  out.put_array(fine_of_.data(), fine_of_.size());
}

void TailTree::load(Reader& in, size_t rows) {
  TailTree next(context_, dim_, dtype_, params_, given_scale_);
  next.params_.keys_per_partition = in.get<uint32_t>();
  require_sound(next.params_.keys_per_partition >= 4 && next.params_.keys_per_partition <= 1024,
                "an impossible size of partitions");
  const auto segments = in.get<uint64_t>();
  require_sound(segments <= rows && (segments != 0) == (rows != 0), "segments that do not fit");
  if (segments != 0) {
    const auto channels = in.get<uint32_t>();
    require_sound(channels == 0 || channels == dim_, "scales of other channels than keys have");
    next.set_scale(in.get_array<float>(channels));
    require_sound(std::all_of(next.key_scale_.begin(), next.key_scale_.end(),
                              [](float s) { return std::isfinite(s) && s > 0.0F; }),
                  "an impossible scale of a channel");
    next.codes_.load_scales(in);
    for (uint64_t i = 0; i < segments; ++i) {
      Segment s{};
      s.begin = in.get<uint64_t>();
      s.coarse = in.get<uint64_t>();
      s.fine = in.get<uint64_t>();
      s.square_values = in.get<double>();
      if (i != 0) next.segments_.back().end = s.begin;
      const Segment before = i == 0 ? Segment{} : next.segments_.back();
      require_sound(
          i == 0 ? s.begin == 0 && s.coarse == 0 && s.fine == 0
                 : s.begin > before.begin && s.coarse > before.coarse && s.fine > before.fine,
          "segments out of order");
      require_sound(std::isfinite(s.square_values) && s.square_values >= 0.0,
                    "an impossible sum of squares");
      next.segments_.push_back(s);
    }
    next.segments_.back().end = rows;
    const auto coarse = in.get<uint64_t>();
    const auto fine = in.get<uint64_t>();
    require_sound(next.segments_.back().begin < rows && coarse <= fine && fine <= rows &&
                      coarse > next.segments_.back().coarse && fine > next.segments_.back().fine,
                  "partitions that do not fit");
    const auto get_level = [&](TailLevel& level, size_t n) {
      level.variances = in.get_array<float>(n);
      level.keys = in.get_array<int8_t>(n * dim_);
      level.values = in.get_array<std::byte>(n * dim_ * dtype_size(dtype_));
      level.sizes.assign(n, 0.0F);
      for (const float v : level.variances) {
        require_sound(std::isfinite(v) && v >= 0.0F, "an impossible variance");
      }
      for (const int8_t k : level.keys) require_sound(k >= -127, "an impossible code of a mean");
      require_sound(
          context_.kernels->all_finite[static_cast<size_t>(dtype_)](level.values.data(), n * dim_),
          "a mean value that is not finite");
    };
    get_level(next.coarse_, coarse);
    get_level(next.fine_, fine);
    next.parents_ = in.get_array<uint32_t>(fine);
    next.fine_of_ = in.get_array<uint32_t>(rows);
    // What can be derived is derived: it cannot contradict the rest.
    next.fine_begin_.clear();
    for (size_t f = 0; f < fine; ++f) {
      const uint32_t before = f == 0 ? 0 : next.parents_[f - 1];
      const bool first = f == 0 || next.parents_[f] == before + 1;
      require_sound(next.parents_[f] < coarse && (first || next.parents_[f] == before) &&
                        (f != 0 || next.parents_[0] == 0),
                    "fine partitions out of order");
      if (first) next.fine_begin_.push_back(static_cast<uint32_t>(f));
    }
    require_sound(next.fine_begin_.size() == coarse, "a coarse partition without fine ones");
    next.fine_begin_.push_back(static_cast<uint32_t>(fine));
    for (const Segment& s : next.segments_) {
      require_sound(next.fine_begin_[s.coarse] == s.fine, "segments that share a partition");
    }
    std::vector<uint32_t> sizes(fine, 0);
    size_t segment = 0;
    for (size_t row = 0; row < rows; ++row) {
      while (row >= next.segments_[segment].end) ++segment;
      const size_t end =
          segment + 1 < segments ? next.segments_[segment + 1].fine : static_cast<size_t>(fine);
      require_sound(next.fine_of_[row] >= next.segments_[segment].fine && next.fine_of_[row] < end,
                    "a row in a partition of another segment");
      ++sizes[next.fine_of_[row]];
    }
    next.row_begin_.assign(1, 0);
    for (size_t f = 0; f < fine; ++f) {
      require_sound(sizes[f] != 0, "an empty partition");
      next.row_begin_.push_back(next.row_begin_.back() + sizes[f]);
      next.fine_.sizes[f] = static_cast<float>(sizes[f]);
      next.coarse_.sizes[next.parents_[f]] += static_cast<float>(sizes[f]);
    }
    next.rows_.resize(rows);
    std::vector<uint32_t> at(next.row_begin_.begin(), next.row_begin_.end() - 1);
    for (size_t row = 0; row < rows; ++row) {
      next.rows_[at[next.fine_of_[row]]++] = static_cast<uint32_t>(row);
    }
    next.update_values();
  }
  next.build_seconds_ = build_seconds_;
  *this = std::move(next);
}

}  // namespace keyhole::index
