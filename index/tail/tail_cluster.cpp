#include "index/tail/tail_cluster.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/row_access.h"
#include "index/partitions/ivf_train.h"
#include "index/partitions/kmeans.h"

namespace keyhole::index {
namespace {

// Ranking the coarse means of n keys costs n/128 products of a group: at 128k, 1024 of them, 7 us.
constexpr size_t kCoarseKeys = 128;
constexpr uint32_t kIterations = 5;
constexpr uint32_t kSeed = 1;

void subtract_mean(std::vector<float>& points, uint32_t dim) {
  const size_t n = points.size() / dim;
  std::vector<double> sum(dim, 0.0);
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < dim; ++j) sum[j] += points[i * dim + j];
  }
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      points[i * dim + j] -= static_cast<float>(sum[j] / static_cast<double>(n));
    }
  }
}

/// labels[i] of points `[n, dim]` in `clusters` clusters.
void cluster(const Context& context, const float* points, size_t n, uint32_t dim, size_t clusters,
             uint32_t* labels) {
  if (clusters <= 1) {
    std::fill_n(labels, n, 0U);
    return;
  }
  const Progress none;
  ProgressMeter meter(none, 1.0);
  const Clustering found = cluster_points(context, nullptr, points, n, dim,
                                          {.clusters = static_cast<uint32_t>(clusters),
                                           .iterations = kIterations,
                                           .nearness = Nearness::l2,
                                           .seed = kSeed},
                                          meter);
  std::copy(found.labels.begin(), found.labels.end(), labels);
}

size_t rounded_share(size_t n, size_t per) { return std::max<size_t>((n + per / 2) / per, 1); }

/// Sums of the rows of one partition.
struct Sums {
  double count = 0.0;
  std::vector<double> keys, values;
  double square_keys = 0.0;  // of scaled keys

  explicit Sums(uint32_t dim) : keys(dim), values(dim) {}
  void clear() {
    count = square_keys = 0.0;
    std::fill(keys.begin(), keys.end(), 0.0);
    std::fill(values.begin(), values.end(), 0.0);
  }
};

}  // namespace

size_t coarse_partition_keys(const TailParams& params) {
  return std::max<size_t>(kCoarseKeys, size_t{4} * params.keys_per_partition);
}

TailLabels cluster_rows(const Context& context, const RowsView& keys, size_t begin, size_t end,
                        std::span<const float> scale, const TailParams& params,
                        const Progress& progress) {
  const cpu::Kernels& kernels = *context.kernels;
  const uint32_t dim = keys.dim;
  const size_t n = end - begin;
  std::vector<float> points = rows_as_f32(kernels, keys, begin, end, {}, scale);
  subtract_mean(points, dim);
  const size_t coarse = std::min(rounded_share(n, coarse_partition_keys(params)), n);
  std::vector<uint32_t> coarse_of(n);
  cluster(context, points.data(), n, dim, coarse, coarse_of.data());
  if (progress && !progress(0.5)) {
    throw Error(Status::cancelled, "the partitioning was cancelled by its caller");
  }

  std::vector<std::vector<uint32_t>> members(coarse);
  for (size_t i = 0; i < n; ++i) members[coarse_of[i]].push_back(static_cast<uint32_t>(i));
  TailLabels labels;
  labels.fine_of.resize(n);
  labels.coarse = coarse;
  std::vector<float> own;
  std::vector<uint32_t> found;
  for (size_t c = 0; c < coarse; ++c) {
    const std::vector<uint32_t>& rows = members[c];
    if (rows.empty()) continue;
    const size_t fine =
        std::min(rounded_share(rows.size(), params.keys_per_partition), rows.size());
    own.resize(rows.size() * dim);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(points.data() + size_t{rows[i]} * dim, dim, own.data() + i * dim);
    }
    found.resize(rows.size());
    cluster(context, own.data(), rows.size(), dim, fine, found.data());
    const auto first = static_cast<uint32_t>(labels.parents.size());
    for (size_t i = 0; i < rows.size(); ++i) labels.fine_of[rows[i]] = first + found[i];
    labels.parents.insert(labels.parents.end(), fine, static_cast<uint32_t>(c));
  }
  return labels;
}

TailSegment summarise(const cpu::Kernels& kernels, const KvView& kv, size_t begin,
                      const TailLabels& labels, const KeyCodes& codes, std::span<const float> scale,
                      DType dtype) {
  const uint32_t dim = kv.keys.dim;
  const size_t row_bytes = dim * dtype_size(dtype);
  const size_t n = labels.fine_of.size();

  TailSegment out;
  // Rows by fine partition, fine partitions by coarse one: a counting sort each.
  std::vector<uint32_t> fine_sizes(labels.parents.size(), 0);
  for (const uint32_t f : labels.fine_of) ++fine_sizes[f];
  std::vector<uint32_t> order;  // fine labels in use, by parent
  order.reserve(fine_sizes.size());
  for (uint32_t f = 0; f < fine_sizes.size(); ++f) {
    if (fine_sizes[f] != 0) order.push_back(f);
  }
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(labels.parents[a], a) < std::pair(labels.parents[b], b);
  });
  std::vector<uint32_t> number(fine_sizes.size(), 0);
  out.row_begin = {0};
  for (uint32_t i = 0; i < order.size(); ++i) {
    number[order[i]] = i;
    out.row_begin.push_back(out.row_begin.back() + fine_sizes[order[i]]);
    const bool new_coarse = i == 0 || labels.parents[order[i]] != labels.parents[order[i - 1]];
    if (new_coarse) out.fine_begin.push_back(i);
    out.parents.push_back(static_cast<uint32_t>(out.fine_begin.size() - 1));
  }
  out.fine_begin.push_back(static_cast<uint32_t>(order.size()));
  out.rows.resize(n);
  out.fine_of.resize(n);
  std::vector<uint32_t> next(out.row_begin.begin(), out.row_begin.end() - 1);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t f = number[labels.fine_of[i]];
    out.fine_of[i] = f;
    out.rows[next[f]++] = static_cast<uint32_t>(begin + i);
  }

  float key[kMaxHeadDim];
  float value[kMaxHeadDim];
  std::vector<int8_t> code(dim);
  std::vector<std::byte> mean_value(row_bytes);
  // Spread around the mean from sums of squares would cancel for keys far from 0: keys are taken relative to
  // the partition's first one.
  std::vector<float> origin(dim);
  std::vector<double> squares(dim, 1.0);  // of the scales
  for (size_t j = 0; j < scale.size(); ++j) squares[j] = double{scale[j]} * scale[j];
  const auto write = [&](TailLevel& level, const Sums& sums) {
    double square_mean = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      const double mean = sums.keys[j] / sums.count;
      square_mean += squares[j] * (mean * mean);
      key[j] = static_cast<float>(mean + origin[j]);
      value[j] = static_cast<float>(sums.values[j] / sums.count);
    }
    const double variance =
        std::max(0.0, sums.square_keys / sums.count - square_mean) / static_cast<double>(dim);
    level.sizes.push_back(static_cast<float>(sums.count));
    level.variances.push_back(static_cast<float>(std::min(variance, 1e30)));
    codes.encode_rows(dense_rows(key, 1, dim, DType::f32), 0, 1, code.data());
    level.keys.insert(level.keys.end(), code.begin(), code.end());
    kernels.from_f32[static_cast<size_t>(dtype)](value, mean_value.data(), dim);
    level.values.insert(level.values.end(), mean_value.begin(), mean_value.end());
  };
  const auto add_rows = [&](Sums& sums, size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      cpu::read_row(kernels, kv.keys, out.rows[i], key);
      cpu::read_row(kernels, kv.values, out.rows[i], value);
      for (uint32_t j = 0; j < dim; ++j) {
        const double x = double{key[j]} - origin[j];
        sums.keys[j] += x;
        sums.square_keys += squares[j] * (x * x);
        sums.values[j] += value[j];
      }
    }
    sums.count += static_cast<double>(last - first);
  };
  const auto set_origin = [&](size_t at) {
    cpu::read_row(kernels, kv.keys, out.rows[at], origin.data());
  };
  Sums sums(dim);
  for (size_t f = 0; f + 1 < out.row_begin.size(); ++f) {
    sums.clear();
    set_origin(out.row_begin[f]);
    add_rows(sums, out.row_begin[f], out.row_begin[f + 1]);
    write(out.fine, sums);
  }
  for (size_t c = 0; c + 1 < out.fine_begin.size(); ++c) {
    sums.clear();
    const size_t first = out.row_begin[out.fine_begin[c]];
    set_origin(first);
    add_rows(sums, first, out.row_begin[out.fine_begin[c + 1]]);
    write(out.coarse, sums);
  }
  for (size_t i = 0; i < n; ++i) {
    cpu::read_row(kernels, kv.values, begin + i, value);
    for (uint32_t j = 0; j < dim; ++j) out.square_values += double{value[j]} * value[j];
  }
  return out;
}

}  // namespace keyhole::index
