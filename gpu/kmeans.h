// k-means on a CUDA device: which centroid is nearest to each of many points, and Lloyd's iterations over that.
// Scores are formed to fp32's precision on tensor cores (gpu/cuda/indexing/plane_tiles.cuh); sums of points are
// integers (fixed point, 2^-40 of the largest element), whose order does not matter: results are deterministic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/types.h"

namespace keyhole::gpu {

/// Points to be clustered, in host memory.
struct KMeansPoints {
  const float* data = nullptr;  ///< `[count, dim]`, finite
  size_t count = 0;
  uint32_t dim = 0;  ///< 64, 80, 96, 128 or 256
};

struct KMeansTraining {
  uint32_t clusters = 0;  ///< 1..points.count
  uint32_t iterations = 0;
  /// Nearest is the largest inner product, and centroids are kept at length 1; else the smallest L2 distance.
  bool spherical = false;
  uint32_t seed = 0;
};

struct KMeansConfig {
  size_t memory_limit =
      0;  ///< bytes of device memory for points; 0: 1 GiB. More points are streamed.
};

/// One thread at a time; several objects work at once. Memory grows with the problems and is kept.
class KMeans {
 public:
  virtual ~KMeans() = default;
  /// Begins with random points, then iterates over at most 256 random points per cluster (those alone are on the
  /// device, or pass through it once per iteration). An empty cluster takes half of the largest one. Writes centroids
  /// `[clusters, dim]` and, where labels is not null, the nearest of them for all points, `[count]`; of equally near
  /// ones the first. Throws Error: invalid_argument, out_of_device_memory, device_error.
  virtual void train(const KMeansPoints& points, const KMeansTraining& training, float* centroids,
                     uint32_t* labels) = 0;
  /// labels[i] = the c of largest  points[i] . centroids[c] - offsets[c]; offsets `[n]` or null: half the squared
  /// length, which gives the smallest L2 distance.
  virtual void assign(const KMeansPoints& points, const float* centroids, const float* offsets,
                      size_t n, uint32_t* labels) = 0;
  [[nodiscard]] virtual size_t bytes() const = 0;  ///< of device memory that it holds
};

}  // namespace keyhole::gpu
