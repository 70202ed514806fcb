// How the rows of a segment become partitions, and partitions their means.
#pragma once

#include "index/tail/tail_tree.h"

namespace keyhole::index {

/// Keys of a coarse partition.
[[nodiscard]] size_t coarse_partition_keys(const TailParams& params);

/// Which partition a row of a segment belongs to: labels `[rows]` of fine partitions, and parents `[fine]`.
/// Numbers may have gaps.
struct TailLabels {
  std::vector<uint32_t> fine_of;
  std::vector<uint32_t> parents;
  size_t coarse = 0;
};

/// Clusters rows [begin, end) of `keys`, each channel times its scale (`[dim]`; empty: 1): coarse by k-means, each of
/// those again.
[[nodiscard]] TailLabels cluster_rows(const Context& context, const RowsView& keys, size_t begin,
                                      size_t end, std::span<const float> scale,
                                      const TailParams& params, const Progress& progress);

/// The partitions that labels describe, empty ones left out, of rows [begin, begin + labels.fine_of.size()).
/// `codes` gives the codes of mean keys; variances are those of scaled keys; mean values are of `dtype`.
[[nodiscard]] TailSegment summarise(const cpu::Kernels& kernels, const KvView& kv, size_t begin,
                                    const TailLabels& labels, const KeyCodes& codes,
                                    std::span<const float> scale, DType dtype);

}  // namespace keyhole::index
