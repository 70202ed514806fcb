// k-means over the keys of one head: Lloyd's iterations from random points. Choices (start, subset, what
// replaces a cluster without points) are those of Faiss 1.7, whose centroids these equal bit for bit.
#pragma once

#include <vector>

#include "cpu/pool.h"
#include "index/partitions/nearest.h"
#include "index/progress.h"

namespace keyhole::index {

struct KMeansConfig {
  uint32_t clusters = 1;  ///< 1..n
  uint32_t iterations = 0;
  Nearness nearness =
      Nearness::l2;  ///< inner_product: spherical k-means, centroids are kept at length 1
  uint32_t seed = 0;
};

/// Trains on points `[n, dim]` and returns centroids `[clusters, dim]`. Beyond 256 points per cluster a
/// random subset of that size is used (more does not move the centroids noticeably). The result depends
/// on the arguments alone, not on the pool (which may be null) or any thread setting of the process.
/// Advances the meter by 1 per point and iteration.
[[nodiscard]] std::vector<float> train_kmeans(const cpu::Kernels& kernels, cpu::Pool* pool,
                                              const float* points, size_t n, uint32_t dim,
                                              const KMeansConfig& config, ProgressMeter& meter);

/// The result of a clustering: centroids, and the cluster of each point.
struct Clustering {
  std::vector<float> centroids;  ///< `[clusters, dim]`
  std::vector<uint32_t> labels;  ///< `[n]`
};

/// Runs train_kmeans(), then finds the nearest of its centroids for every point; the context's accelerator does both
/// where it takes the task. Advances the meter by 1 per point of the sample and iteration, and by 1 per point.
[[nodiscard]] Clustering cluster_points(const Context& context, cpu::Pool* pool,
                                        const float* points, size_t n, uint32_t dim,
                                        const KMeansConfig& config, ProgressMeter& meter);

/// How many points train_kmeans() visits per iteration, in the meter's unit.
[[nodiscard]] size_t kmeans_sample(size_t n, size_t clusters);

/// Writes labels[i] = the nearest centroid of points[i], with blocks of points spread over the pool (may be null).
/// Advances the meter by 1 per point.
void assign_points(const NearestCentroid& nearest, cpu::Pool* pool, const float* points, size_t n,
                   uint32_t dim, uint32_t* labels, ProgressMeter& meter);

}  // namespace keyhole::index
