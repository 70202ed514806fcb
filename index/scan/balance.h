// The balanced space of one KV head: keys are multiplied by s and queries divided by it, channel by channel, which
// changes no inner product but makes all channels weigh alike wherever keys are compared, averaged or rounded.
//
//     s_j = sqrt(rms of q_j over the training queries / spread of k_j about its block's mean)
//
// Keys of real models have channels that are many times as wide as the others. Quantised as they are, 2-bit codes
// answered 2 of 64 questions with six channels of every head times 16, and 60 of 64 in this space, as without such
// channels. The spread of the keys alone is no substitute: 33 of 64 even without outliers.
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace keyhole::index {

/// The most complete blocks of keys from which a balance is learned.
inline constexpr size_t kBalanceBlocks = 64;

struct Balance {
  /// `[dim]` s, all finite and above 0, scaled so that the mean of (s_j * spread of k_j)^2 over the channels is 1:
  /// then the factors of codes (fp16) lie about 0.5, whatever the size of the keys.
  std::vector<float> key_scale;
  /// The divisor of values before they are encoded: the root mean square of their spread, to a power of 2.
  float value_scale = 1.0F;

  /// Whether all numbers are possible results of learn_balance().
  [[nodiscard]] bool is_sound() const;
};

/// Learns from the complete blocks of `kv` (at most kBalanceBlocks, evenly spread; all rows where there is no
/// complete block) and the queries of the head's group `[count, dim]`. Channels in which queries or keys never differ
/// from 0 get the s of an average channel. kv.values may be empty. Few queries count less, as if there were one more
/// in which all channels add as much to logits.
///
/// Without queries s is the same for all channels, except that those wider than 4 times the median one are narrowed
/// to that: their queries are probably narrower by the same factor. Recall@100 of ivf, hnsw and roargraph, and the
/// p50 of second-order tails' error, on a 16k trace without queries, with channels as they are and with 6 of them
/// times 16:
///
///     s                            as they are                      6 channels times 16
///     the same for all             0.784, 0.913, 0.853; 0.027       0.400, 0.455, 0.723; 0.380
///     1 / spread                   0.514, 0.782, 0.770; 0.181       the same
///     sqrt(1 / spread)             0.741, 0.885, 0.833; 0.031       0.611, 0.836, 0.800; 0.050
///     narrowed beyond 3 medians    0.767, 0.907, 0.843; 0.028       0.739, 0.898, 0.837; 0.036
///     narrowed beyond 4 medians    0.776, 0.911, 0.848; 0.027       0.717, 0.887, 0.837; 0.039
///     with queries                 0.768, 0.881, 0.840; 0.027       the same
[[nodiscard]] Balance learn_balance(const cpu::Kernels& kernels, const KvView& kv,
                                    const RowsView& queries);

}  // namespace keyhole::index
