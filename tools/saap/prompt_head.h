// The training data of one KV head of one recorded prompt: where the attention of its queries goes, by partition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/io/trace.h"
#include "tools/saap/partitions.h"

namespace keyhole::tools {

/// The keys that count. Sink and window are attended exactly, so only pairs with the key in [sink, position + 1 -
/// window) are learned from ("long-range pairs", Saap section 4).
struct LongRange {
  size_t sink = 128;
  size_t window = 512;
};

/// Stands for ln 0 among PromptHead::log_sizes: e^-30 of a partition's attention is nothing.
inline constexpr float kLogOfNone = -30.0F;

/// The training data. Rows are queries: position after position, and the g heads of the group within a position.
struct PromptHead {
  size_t dim = 0, group = 0;
  std::vector<float> queries;  ///< `[rows, d]`, RoPE undone
  std::vector<float> targets;  ///< `[rows, C]`: shares of the long-range attention, sums are 1 or 0
  std::vector<float> mass;     ///< `[rows]`: the long-range part of the whole attention
  std::vector<float> log_sizes;  ///< `[positions, C]` ln of the long-range keys of each partition
  std::vector<uint32_t> positions;  ///< `[positions]`
  std::vector<float> means;     ///< `[C, d]`: mean key (RoPE undone) of each partition; 0: empty
  std::vector<uint32_t> sizes;  ///< `[C]`: long-range keys of the last position in each partition

  [[nodiscard]] size_t rows() const { return mass.size(); }
  /// The log_sizes of rows [first, first + n), `[n, C]`.
  [[nodiscard]] std::vector<float> priors(size_t first, size_t n) const;
};

/// Returns keys [begin, end) of a head with RoPE undone, `[end - begin, d]`.
[[nodiscard]] std::vector<float> unroped_keys(const TraceInfo& info, const TraceHead& head,
                                              size_t begin, size_t end);

/// Computes the targets of all recorded queries, decode-time and training ones alike. On one thread.
[[nodiscard]] PromptHead attend_by_partition(const Trace& trace, const TraceHead& head,
                                             const Partitions& partitions, const LongRange& range);

}  // namespace keyhole::tools
