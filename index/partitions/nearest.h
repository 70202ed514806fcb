// Nearest-centroid assignment of many points, through the dispatch table's fp32 kernel: 16 points are the
// "group", centroids stream past them. Unlike an sgemm, its result for a point depends on that point
// and the centroids alone, so any division of the points over threads gives the same bits.
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace keyhole::index {

/// What "nearest" means: smallest L2 distance, or largest inner product (spherical k-means).
enum class Nearness { l2, inner_product };

class NearestCentroid {
 public:
  NearestCentroid(const cpu::Kernels& kernels, Nearness nearness, uint32_t dim)
      : kernels_(&kernels), nearness_(nearness), dim_(dim) {}

  /// Replaces the centroids, `[n, dim]`; borrowed.
  void set(const float* centroids, size_t n);
  /// Replaces the centroids, each with a bonus of its own: the nearest is that of largest x . c + bonus.
  void set(const float* centroids, const std::vector<float>& bonuses);

  /// Writes labels[i] = the nearest centroid of points[i] (`[n, dim]`); of equally near ones the first.
  void assign(const float* points, size_t n, uint32_t* labels) const;

 private:
  const cpu::Kernels* kernels_;
  Nearness nearness_;
  uint32_t dim_;
  const float* centroids_ = nullptr;
  size_t count_ = 0;
  std::vector<float> offsets_;  // |c|^2 / 2: argmin |x - c|^2 = argmax x.c - |c|^2/2; zeros for IP
};

}  // namespace keyhole::index
