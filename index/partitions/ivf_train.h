// Partitions of a range of rows: k-means on the keys, then the keys regrouped by their nearest centroid.
#pragma once

#include <span>
#include <vector>

#include "index/base.h"
#include "index/partitions/key_lists.h"
#include "index/partitions/kmeans.h"
#include "index/partitions/rope_undo.h"

namespace keyhole::index {

/// How the rows of one part are clustered.
struct PartConfig {
  uint32_t iterations;
  Nearness nearness;
  bool center;  ///< cluster the keys minus their mean
  uint32_t seed;
  const RopeUndo* rope;  ///< cluster keys as they are before RoPE
  /// `[dim]` factor of each channel before keys are clustered (scan/balance.h), so that the nearest by L2 distance is
  /// the nearest where all channels weigh alike.
  std::span<const float> scale;
  DType dtype;  ///< of the keys that lists hold
};

/// The rows [begin, end), clustered on their own.
struct Part {
  size_t begin = 0;
  size_t end = 0;
  std::vector<float> centroids;  ///< `[lists.count(), dim]`: the mean key of each list, not scaled
  KeyLists lists;                ///< none is empty when trained
};

/// Clusters rows [begin, end) of `keys` into at most `lists` lists (1..end-begin). Advances the meter by
/// part_work().
[[nodiscard]] Part train_part(const Context& context, const RowsView& keys, size_t begin,
                              size_t end, size_t lists, const PartConfig& config,
                              ProgressMeter& meter);
[[nodiscard]] double part_work(size_t rows, size_t lists, uint32_t iterations);

/// Returns rows [begin, end) of `keys` as fp32, `[end - begin, dim]`, with their RoPE undone and each channel times
/// its scale (`[dim]`; empty: 1). Elements are clamped to 1e15, before and after, so that squared lengths stay finite
/// for any fp32 key (fp16 and bf16 models come nowhere near).
[[nodiscard]] std::vector<float> rows_as_f32(const cpu::Kernels& kernels, const RowsView& keys,
                                             size_t begin, size_t end, const RopeUndo& rope = {},
                                             std::span<const float> scale = {});

}  // namespace keyhole::index
