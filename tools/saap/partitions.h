// Partitions of keys whose RoPE is undone: spherical k-means over the keys of many prompts. A key belongs to the
// partition of largest x . c + offset; the offset subtracts the keys' common mean (see train_partitions()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace keyhole::tools {

struct Partitions {
  size_t dim = 0;
  std::vector<float> centroids;  ///< `[C, d]`, each of length 1
  std::vector<float> offsets;    ///< `[C]`

  [[nodiscard]] size_t count() const { return offsets.size(); }
};

struct PartitionTraining {
  size_t partitions = 1024;  ///< at most the number of points
  uint32_t iterations = 10;  ///< Saap appendix A
  uint64_t seed = 1;
};

/// Spherical k-means over points `[n, d]` minus their mean m, which all keys of a head share and which no
/// softmax sees: with x for a key, (x - m) . c = x . c + offset, offset = -m . c. On one thread.
[[nodiscard]] Partitions train_partitions(const float* points, size_t n, size_t dim,
                                          const PartitionTraining& training);

/// The partition of each of the points `[n, d]`; of equally near ones the first.
[[nodiscard]] std::vector<uint32_t> partition_of(const Partitions& partitions, const float* points,
                                                 size_t n);

}  // namespace keyhole::tools
