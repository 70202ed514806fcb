// Fixed partitions of keys whose RoPE is undone: a key belongs to the partition of largest key . centroid + bonus.
// They are trained once, on this context or on others; keys that come later are assigned.
#pragma once

#include <vector>

#include "index/base.h"
#include "index/partitions/key_lists.h"
#include "index/partitions/kmeans.h"
#include "index/partitions/rope_undo.h"

namespace keyhole::index {

/// The most partitions that a file may have: one with more is damaged.
inline constexpr size_t kMaxPartitions = size_t{1} << 24;

struct KeyPartitions {
  std::vector<float> centroids;  ///< `[count(), dim]`
  std::vector<float> bonuses;    ///< `[count()]`

  [[nodiscard]] size_t count() const { return bonuses.size(); }
  [[nodiscard]] size_t bytes() const {
    return (centroids.capacity() + bonuses.capacity()) * sizeof(float);
  }
  void save(Writer& out) const;
  [[nodiscard]] static KeyPartitions load(Reader& in, uint32_t dim);
};

/// Trains `count` partitions (1..keys.tokens) by spherical k-means over (a sample of) the keys minus their mean, with
/// each channel times its scale (`[dim]`, scan/balance.h; empty: 1). The bonuses hold the mean and the centroids the
/// scale, so that a key is assigned as it is. Advances the meter by kmeans_sample() * iterations.
[[nodiscard]] KeyPartitions train_key_partitions(const Context& context, const RowsView& keys,
                                                 const RopeUndo& rope, std::span<const float> scale,
                                                 size_t count, uint32_t iterations, uint32_t seed,
                                                 ProgressMeter& meter);

/// Returns the partition of each of the rows [begin, end). Advances the meter by 1 per row.
[[nodiscard]] std::vector<uint32_t> partition_rows(const Context& context,
                                                   const KeyPartitions& partitions,
                                                   const RowsView& keys, size_t begin, size_t end,
                                                   const RopeUndo& rope, ProgressMeter& meter);

/// Returns the mean of each list's keys with their RoPE undone, `[lists.count(), dim]` of the keys' dtype; for an
/// empty list, the mean of all.
[[nodiscard]] std::vector<std::byte> mean_keys(const Context& context, const KeyLists& lists,
                                               uint32_t dim, DType dtype, const RopeUndo& rope);

}  // namespace keyhole::index
