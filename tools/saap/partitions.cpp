#include "tools/saap/partitions.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tools/llama/blas.h"

namespace keyhole::tools {
namespace {

constexpr size_t kBlock = 256;  // points whose scores lie in memory at once

void normalise(float* x, size_t n) {
  double squares = 0;
  for (size_t i = 0; i < n; ++i) squares += double{x[i]} * x[i];
  if (squares <= 0) return;
  const auto factor = static_cast<float>(1 / std::sqrt(squares));
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

std::vector<double> mean_of(const float* points, size_t n, size_t dim) {
  std::vector<double> mean(dim);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < dim; ++j) mean[j] += points[i * dim + j];
  }
  for (double& m : mean) m /= static_cast<double>(n);
  return mean;
}

// The offsets that make x . c + offset the inner product of c with x minus the mean.
void set_offsets(Partitions& partitions, const std::vector<double>& mean) {
  const size_t d = partitions.dim;
  for (size_t c = 0; c < partitions.count(); ++c) {
    double sum = 0;
    for (size_t j = 0; j < d; ++j) sum += mean[j] * partitions.centroids[c * d + j];
    partitions.offsets[c] = static_cast<float>(-sum);
  }
}

}  // namespace

std::vector<uint32_t> partition_of(const Partitions& partitions, const float* points, size_t n) {
  const size_t d = partitions.dim;
  const size_t count = partitions.count();
  std::vector<uint32_t> labels(n);
  std::vector<float> scores(std::min(n, kBlock) * count);
  for (size_t first = 0; first < n; first += kBlock) {
    const size_t rows = std::min(kBlock, n - first);
    gemm_nt(rows, count, d, points + first * d, d, partitions.centroids.data(), d, 0, scores.data(),
            count);
    for (size_t i = 0; i < rows; ++i) {
      const float* row = scores.data() + i * count;
      uint32_t best = 0;
      float most = row[0] + partitions.offsets[0];
      for (size_t c = 1; c < count; ++c) {
        const float score = row[c] + partitions.offsets[c];
        if (score > most) {
          most = score;
          best = static_cast<uint32_t>(c);
        }
      }
      labels[first + i] = best;
    }
  }
  return labels;
}

Partitions train_partitions(const float* points, size_t n, size_t dim,
                            const PartitionTraining& training) {
  const size_t count = std::min(training.partitions, n);
  const std::vector<double> mean = mean_of(points, n, dim);
  Partitions out{dim, std::vector<float>(count * dim), std::vector<float>(count)};
  std::mt19937_64 random(training.seed);

  const auto seed_with = [&](size_t c, size_t point) {
    float* centroid = out.centroids.data() + c * dim;
    for (size_t j = 0; j < dim; ++j) {
      centroid[j] = static_cast<float>(points[point * dim + j] - mean[j]);
    }
    normalise(centroid, dim);
  };
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t c = 0; c < count; ++c) {
    std::swap(order[c], order[c + random() % (n - c)]);
    seed_with(c, order[c]);
  }
  set_offsets(out, mean);

  std::vector<double> sums(count * dim);
  std::vector<size_t> sizes(count);
  for (uint32_t iteration = 0; iteration < training.iterations; ++iteration) {
    const std::vector<uint32_t> labels = partition_of(out, points, n);
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(sizes.begin(), sizes.end(), size_t{0});
    for (size_t i = 0; i < n; ++i) {
      ++sizes[labels[i]];
      double* sum = sums.data() + labels[i] * dim;
      for (size_t j = 0; j < dim; ++j) sum[j] += points[i * dim + j] - mean[j];
    }
    for (size_t c = 0; c < count; ++c) {
      if (sizes[c] == 0) {  // starts anew somewhere else
        seed_with(c, random() % n);
        continue;
      }
      for (size_t j = 0; j < dim; ++j) {
        out.centroids[c * dim + j] =
            static_cast<float>(sums[c * dim + j] / static_cast<double>(sizes[c]));
      }
      normalise(out.centroids.data() + c * dim, dim);
    }
    set_offsets(out, mean);
  }
  return out;
}

}  // namespace keyhole::tools
