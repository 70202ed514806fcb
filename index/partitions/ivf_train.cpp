#include "index/partitions/ivf_train.h"

#include <algorithm>

#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr float kLargestElement = 1e15F;

std::vector<float> mean_row(const std::vector<float>& points, size_t n, uint32_t dim) {
  std::vector<double> sum(dim, 0.0);
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < dim; ++j) sum[j] += points[i * dim + j];
  }
  std::vector<float> mean(dim);
  for (uint32_t j = 0; j < dim; ++j) mean[j] = static_cast<float>(sum[j] / static_cast<double>(n));
  return mean;
}

// Renumbers labels so that every list has a member; returns the number of lists.
size_t drop_empty(std::vector<uint32_t>& labels, size_t lists) {
  std::vector<uint32_t> renumbered(lists, 0);
  for (const uint32_t label : labels) renumbered[label] = 1;
  uint32_t next = 0;
  for (uint32_t& r : renumbered) r = r != 0 ? next++ : 0;
  for (uint32_t& label : labels) label = renumbered[label];
  return next;
}

// The mean of each list's points plus `shift`, less the scale that points have: the last Lloyd update, and what
// stands for the list in a search (under spherical k-means the trained centroids have lost their length).
std::vector<float> list_means(const std::vector<float>& points, const std::vector<uint32_t>& labels,
                              size_t lists, uint32_t dim, const std::vector<float>& shift,
                              std::span<const float> scale) {
  std::vector<float> means(lists * dim, 0.0F);
  std::vector<uint32_t> sizes(lists, 0);
  for (size_t i = 0; i < labels.size(); ++i) {
    float* mean = means.data() + size_t{labels[i]} * dim;
    ++sizes[labels[i]];
    for (uint32_t j = 0; j < dim; ++j) mean[j] += points[i * dim + j];
  }
  for (size_t l = 0; l < lists; ++l) {
    const float share = 1.0F / static_cast<float>(sizes[l]);
    for (uint32_t j = 0; j < dim; ++j) {
      const float mean = means[l * dim + j] * share + shift[j];
      means[l * dim + j] = scale.empty() ? mean : mean / scale[j];
    }
  }
  return means;
}

}  // namespace

std::vector<float> rows_as_f32(const cpu::Kernels& kernels, const RowsView& keys, size_t begin,
                               size_t end, const RopeUndo& rope, std::span<const float> scale) {
  std::vector<float> rows((end - begin) * keys.dim);
  for (size_t i = begin; i < end; ++i) {
    cpu::read_row(kernels, keys, i, rows.data() + (i - begin) * keys.dim);
  }
  for (float& x : rows) x = std::clamp(x, -kLargestElement, kLargestElement);
  rope.rows(rows.data(), begin, end - begin);
  if (scale.empty()) return rows;
  for (size_t i = 0; i < end - begin; ++i) {
    float* row = rows.data() + i * keys.dim;
    for (uint32_t j = 0; j < keys.dim; ++j) {
      row[j] = std::clamp(row[j] * scale[j], -kLargestElement, kLargestElement);
    }
  }
  return rows;
}

Part train_part(const Context& context, const RowsView& keys, size_t begin, size_t end,
                size_t lists, const PartConfig& config, ProgressMeter& meter) {
  const cpu::Kernels& kernels = *context.kernels;
  const uint32_t dim = keys.dim;
  const size_t n = end - begin;
  std::vector<float> points = rows_as_f32(kernels, keys, begin, end, *config.rope, config.scale);
  std::vector<float> shift(dim, 0.0F);
  if (config.center) {
    shift = mean_row(points, n, dim);
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t j = 0; j < dim; ++j) points[i * dim + j] -= shift[j];
    }
  }

  const KMeansConfig kmeans = {.clusters = static_cast<uint32_t>(lists),
                               .iterations = config.iterations,
                               .nearness = config.nearness,
                               .seed = config.seed};
  std::vector<uint32_t> labels =
      cluster_points(context, context.pool, points.data(), n, dim, kmeans, meter).labels;

  Part part;
  part.begin = begin;
  part.end = end;
  const size_t filled = drop_empty(labels, lists);
  part.centroids = list_means(points, labels, filled, dim, shift, config.scale);
  part.lists = KeyLists(kernels, config.dtype, keys, begin, labels, filled);
  return part;
}

double part_work(size_t rows, size_t lists, uint32_t iterations) {
  return static_cast<double>(kmeans_sample(rows, lists)) * iterations + static_cast<double>(rows);
}

}  // namespace keyhole::index
