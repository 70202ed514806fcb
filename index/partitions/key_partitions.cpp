#include "index/partitions/key_partitions.h"

#include <algorithm>
#include <cmath>

#include "index/accelerator.h"
#include "index/partitions/ivf_train.h"

namespace keyhole::index {
namespace {

constexpr size_t kRowsPerTask = 512;

// Takes every `step`-th row as a sample.
std::vector<float> sample_rows(const cpu::Kernels& kernels, const RowsView& keys, size_t wanted,
                               const RopeUndo& rope, std::span<const float> scale) {
  std::vector<float> points;
  points.reserve(wanted * keys.dim);
  for (size_t i = 0; i < wanted; ++i) {
    const size_t row = i * keys.tokens / wanted;
    const std::vector<float> point = rows_as_f32(kernels, keys, row, row + 1, rope, scale);
    points.insert(points.end(), point.begin(), point.end());
  }
  return points;
}

}  // namespace

void KeyPartitions::save(Writer& out) const {
  out.put(static_cast<uint64_t>(count()));
  out.put_array(centroids.data(), centroids.size());
  out.put_array(bonuses.data(), bonuses.size());
}

KeyPartitions KeyPartitions::load(Reader& in, uint32_t dim) {
  const auto count = in.get<uint64_t>();
  require_sound(count <= kMaxPartitions, "an impossible number of partitions");
  KeyPartitions out;
  out.centroids = in.get_array<float>(count * dim);
  out.bonuses = in.get_array<float>(count);
  const auto finite = [](float x) { return std::isfinite(x); };
  require_sound(std::all_of(out.centroids.begin(), out.centroids.end(), finite) &&
                    std::all_of(out.bonuses.begin(), out.bonuses.end(), finite),
                "a centroid that is not finite");
  return out;
}

KeyPartitions train_key_partitions(const Context& context, const RowsView& keys,
                                   const RopeUndo& rope, std::span<const float> scale, size_t count,
                                   uint32_t iterations, uint32_t seed, ProgressMeter& meter) {
  const uint32_t dim = keys.dim;
  const size_t n = kmeans_sample(keys.tokens, count);
  std::vector<float> points = sample_rows(*context.kernels, keys, n, rope, scale);
  std::vector<double> mean(dim, 0.0);
  for (size_t i = 0; i < points.size(); ++i) mean[i % dim] += points[i] / static_cast<double>(n);
  for (size_t i = 0; i < points.size(); ++i) points[i] -= static_cast<float>(mean[i % dim]);
  KeyPartitions out;
  const KMeansConfig config = {.clusters = static_cast<uint32_t>(count),
                               .iterations = iterations,
                               .nearness = Nearness::inner_product,
                               .seed = seed};
  out.centroids.resize(count * dim);
  if (context.accelerator != nullptr &&
      context.accelerator->kmeans({.points = points.data(), .n = n, .dim = dim, .config = config},
                                  {.centroids = out.centroids.data()})) {
    meter.advance(static_cast<double>(n) * iterations);
  } else {
    out.centroids =
        train_kmeans(*context.kernels, context.pool, points.data(), n, dim, config, meter);
  }
  out.bonuses.resize(count);
  for (size_t c = 0; c < count; ++c) {
    double sum = 0.0;
    for (uint32_t j = 0; j < dim; ++j) sum += mean[j] * out.centroids[c * dim + j];
    out.bonuses[c] = static_cast<float>(-sum);
    for (uint32_t j = 0; j < dim && !scale.empty(); ++j) out.centroids[c * dim + j] *= scale[j];
  }
  return out;
}

std::vector<uint32_t> partition_rows(const Context& context, const KeyPartitions& partitions,
                                     const RowsView& keys, size_t begin, size_t end,
                                     const RopeUndo& rope, ProgressMeter& meter) {
  NearestCentroid nearest(*context.kernels, Nearness::inner_product, keys.dim);
  nearest.set(partitions.centroids.data(), partitions.bonuses);
  std::vector<uint32_t> labels(end - begin);
  cpu::run_on(context.pool, (labels.size() + kRowsPerTask - 1) / kRowsPerTask,
              [&](uint32_t task, uint32_t) {
                const size_t first = begin + task * kRowsPerTask;
                const size_t n = std::min(kRowsPerTask, end - first);
                const std::vector<float> points =
                    rows_as_f32(*context.kernels, keys, first, first + n, rope);
                nearest.assign(points.data(), n, labels.data() + (first - begin));
                meter.advance(static_cast<double>(n));
              });
  return labels;
}

std::vector<std::byte> mean_keys(const Context& context, const KeyLists& lists, uint32_t dim,
                                 DType dtype, const RopeUndo& rope) {
  const auto kind = static_cast<size_t>(dtype);
  std::vector<float> means(lists.count() * dim, 0.0F);
  cpu::run_on(context.pool, lists.count(), [&](uint32_t l, uint32_t) {
    const KeyList list = lists.list(l);
    double sums[kMaxHeadDim] = {};
    float row[kMaxHeadDim];
    for (uint32_t i = 0; i < list.size; ++i) {
      context.kernels->to_f32[kind](list.keys + i * dim * dtype_size(dtype), row, dim);
      rope.rows(row, list.rows[i], 1);
      for (uint32_t j = 0; j < dim; ++j) sums[j] += row[j];
    }
    for (uint32_t j = 0; j < dim && list.size > 0; ++j) {
      means[l * dim + j] = static_cast<float>(sums[j] / list.size);
    }
  });
  std::vector<double> all(dim, 0.0);
  double rows = 0.0;
  for (size_t l = 0; l < lists.count(); ++l) {
    const double size = lists.list(l).size;
    rows += size;
    for (uint32_t j = 0; j < dim; ++j) all[j] += size * means[l * dim + j];
  }
  for (size_t l = 0; l < lists.count(); ++l) {
    for (uint32_t j = 0; j < dim && lists.list(l).size == 0 && rows > 0; ++j) {
      means[l * dim + j] = static_cast<float>(all[j] / rows);
    }
  }
  std::vector<std::byte> out(means.size() * dtype_size(dtype));
  context.kernels->from_f32[kind](means.data(), out.data(), means.size());
  return out;
}

}  // namespace keyhole::index
