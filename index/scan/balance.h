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

struct Balance {
  /// `[dim]` s, all finite and above 0. Scaled so that the mean of (s_j * spread of k_j)^2 over the channels is 1: the
  /// factors of codes (fp16) then lie about 0.5, whatever the size of the keys.
  std::vector<float> key_scale;
  /// Values are divided by it before they are encoded: the root mean square of their spread, to a power of 2.
  float value_scale = 1.0F;
};

/// Learns from the complete blocks of `kv` (at most 64 of them, evenly spread; all rows where there is none), and the
/// queries of the head's group `[count, dim]`. Without queries s is the same for all channels. Channels in which
/// queries or keys never differ from 0 get the s of an average channel.
[[nodiscard]] Balance learn_balance(const cpu::Kernels& kernels, const KvView& kv,
                                    const RowsView& queries);

}  // namespace keyhole::index
