// How the rows of a segment are clustered into partitions, and how the means of partitions are computed.
#pragma once

#include "cpu/tensor_view.h"
#include "index/tail/tail_tree.h"

namespace keyhole::index {

/// Number of keys of a coarse partition.
[[nodiscard]] size_t coarse_partition_keys(const TailParams& params);

/// The partition of each row of a segment: labels `[rows]` of fine partitions, and parents `[fine]`, their coarse
/// partitions. Numbers may have gaps.
struct TailLabels {
  std::vector<uint32_t> fine_of;
  std::vector<uint32_t> parents;
  size_t coarse = 0;
};

/// Clusters rows [begin, end) of `keys`, with each channel times its scale (`[dim]`; empty: 1), into coarse
/// partitions by k-means, and each of these into fine ones.
[[nodiscard]] TailLabels cluster_rows(const Context& context, const RowsView& keys, size_t begin,
                                      size_t end, std::span<const float> scale,
                                      const TailParams& params, const Progress& progress);

/// Computes the partitions that the labels describe, without empty ones, of rows [begin, begin +
/// labels.fine_of.size()). `codes` encodes the mean keys; variances are those of scaled keys; mean values are of
/// `dtype`.
[[nodiscard]] TailSegment summarise(const cpu::Kernels& kernels, const KvView& kv, size_t begin,
                                    const TailLabels& labels, const KeyCodes& codes,
                                    std::span<const float> scale, DType dtype);

}  // namespace keyhole::index
