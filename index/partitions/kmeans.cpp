#include "index/partitions/kmeans.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "index/accelerator.h"

namespace keyhole::index {
namespace {

constexpr size_t kPointsPerCluster = 256;  // more do not move a centroid noticeably
constexpr size_t kBlock = 512;             // points per task: about a millisecond at 1000 centroids
constexpr float kNudge = 1.0F / 1024;      // how far apart the halves of a divided cluster begin
constexpr uint32_t kSplitSeed = 1234;

// The first `count` of the numbers 0..n-1 in a random order. By hand, because std::shuffle and the standard
// distributions give other numbers with every standard library.
std::vector<uint32_t> random_choice(size_t n, size_t count, uint32_t seed) {
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0U);
  std::mt19937 random(seed);
  for (size_t i = 0; i < count && i + 1 < n; ++i) {
    std::swap(order[i], order[i + random() % (n - i)]);
  }
  order.resize(count);
  return order;
}

std::vector<float> gather(const float* points, const std::vector<uint32_t>& rows, uint32_t dim) {
  std::vector<float> out(rows.size() * dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(points + size_t{rows[i]} * dim, dim, out.data() + i * dim);
  }
  return out;
}

// The centroids of one training, and Lloyd's step: each centroid moves to the mean of its points.
class Centroids {
 public:
  Centroids(std::vector<float> values, uint32_t dim, Nearness nearness)
      : dim_(dim), nearness_(nearness), sizes_(values.size() / dim), values_(std::move(values)) {
    normalise();
  }

  [[nodiscard]] const float* data() const { return values_.data(); }
  [[nodiscard]] size_t count() const { return sizes_.size(); }
  [[nodiscard]] std::vector<float> take() { return std::move(values_); }

  void move_to_means(const float* points, const std::vector<uint32_t>& labels) {
    std::fill(values_.begin(), values_.end(), 0.0F);
    std::fill(sizes_.begin(), sizes_.end(), 0.0F);
    for (size_t i = 0; i < labels.size(); ++i) {
      float* mean = centroid(labels[i]);
      const float* point = points + i * dim_;
      for (uint32_t j = 0; j < dim_; ++j) mean[j] += point[j];
      ++sizes_[labels[i]];
    }
    for (size_t c = 0; c < count(); ++c) {
      if (sizes_[c] == 0.0F) continue;
      const float share = 1.0F / sizes_[c];
      for (uint32_t j = 0; j < dim_; ++j) centroid(c)[j] *= share;
    }
    replace_empty(labels.size());
    normalise();
  }

 private:
  float* centroid(size_t c) { return values_.data() + c * dim_; }

  // A cluster without points gets half of another's, chosen with probability (size - 1) / (points - clusters).
  void replace_empty(size_t points) {
    std::mt19937 random(kSplitSeed);
    const auto spare = static_cast<double>(points - count());
    const auto uniform = [&] {
      return static_cast<float>(random()) / static_cast<float>(std::mt19937::max());
    };
    const auto chance = [&](size_t c) { return static_cast<float>((sizes_[c] - 1.0) / spare); };
    for (size_t empty = 0; empty < count(); ++empty) {
      if (sizes_[empty] != 0.0F) continue;
      size_t full = 0;
      while (uniform() >= chance(full)) full = (full + 1) % count();
      for (uint32_t j = 0; j < dim_; ++j) {
        const float nudge = j % 2 == 0 ? kNudge : -kNudge;
        centroid(empty)[j] = centroid(full)[j] * (1.0F + nudge);
        centroid(full)[j] *= 1.0F - nudge;
      }
      sizes_[empty] = sizes_[full] / 2;
      sizes_[full] -= sizes_[empty];
    }
  }

  void normalise() {
    if (nearness_ != Nearness::inner_product) return;
    for (size_t c = 0; c < count(); ++c) {
      double squares = 0.0;
      for (uint32_t j = 0; j < dim_; ++j) squares += centroid(c)[j] * centroid(c)[j];
      if (squares == 0.0) continue;
      const float inverse = 1.0F / std::sqrt(static_cast<float>(squares));
      for (uint32_t j = 0; j < dim_; ++j) centroid(c)[j] *= inverse;
    }
  }

  uint32_t dim_;
  Nearness nearness_;
  std::vector<float> sizes_;  // points of each cluster
  std::vector<float> values_;
};

}  // namespace

size_t kmeans_sample(size_t n, size_t clusters) {
  return std::min(n, clusters * kPointsPerCluster);
}

void assign_points(const NearestCentroid& nearest, cpu::Pool* pool, const float* points, size_t n,
                   uint32_t dim, uint32_t* labels, ProgressMeter& meter) {
  const auto block = [&](uint32_t task, uint32_t) {
    const size_t first = task * kBlock;
    const size_t size = std::min(kBlock, n - first);
    meter.advance(static_cast<double>(size));
    nearest.assign(points + first * dim, size, labels + first);
  };
  cpu::run_on(pool, (n + kBlock - 1) / kBlock, block);
}

std::vector<float> train_kmeans(const cpu::Kernels& kernels, cpu::Pool* pool, const float* points,
                                size_t n, uint32_t dim, const KMeansConfig& config,
                                ProgressMeter& meter) {
  if (config.clusters == 0 || config.clusters > n) {
    throw Error(Status::internal, "k-means: " + std::to_string(config.clusters) + " clusters of " +
                                      std::to_string(n) + " points: at least 1, at most one each");
  }
  if (!kernels.all_finite[static_cast<size_t>(DType::f32)](
          reinterpret_cast<const std::byte*>(points), n * dim)) {
    throw Error(Status::internal, "k-means: a point that is not finite");
  }
  std::vector<float> sample;
  if (const size_t most = kmeans_sample(n, config.clusters); most < n) {
    sample = gather(points, random_choice(n, most, config.seed), dim);
    points = sample.data();
    n = most;
  }
  if (n == config.clusters)
    return Centroids({points, points + n * dim}, dim, config.nearness).take();
  Centroids centroids(gather(points, random_choice(n, config.clusters, config.seed + 1), dim), dim,
                      config.nearness);
  NearestCentroid nearest(kernels, config.nearness, dim);
  std::vector<uint32_t> labels(n);
  for (uint32_t i = 0; i < config.iterations; ++i) {
    nearest.set(centroids.data(), centroids.count());
    assign_points(nearest, pool, points, n, dim, labels.data(), meter);
    centroids.move_to_means(points, labels);
  }
  return centroids.take();
}

Clustering cluster_points(const Context& context, cpu::Pool* pool, const float* points, size_t n,
                          uint32_t dim, const KMeansConfig& config, ProgressMeter& meter) {
  Clustering out;
  out.labels.resize(n);
  if (context.accelerator != nullptr) {
    out.centroids.resize(size_t{config.clusters} * dim);
    if (context.accelerator->kmeans({.points = points, .n = n, .dim = dim, .config = config},
                                    {out.centroids.data(), out.labels.data()})) {
      const auto trained = static_cast<double>(kmeans_sample(n, config.clusters));
      meter.advance(trained * config.iterations + static_cast<double>(n));
      return out;
    }
  }
  out.centroids = train_kmeans(*context.kernels, pool, points, n, dim, config, meter);
  NearestCentroid nearest(*context.kernels, config.nearness, dim);
  nearest.set(out.centroids.data(), config.clusters);
  assign_points(nearest, pool, points, n, dim, out.labels.data(), meter);
  return out;
}

}  // namespace keyhole::index
