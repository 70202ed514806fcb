// How much attention the probed partitions hold, on prompts that training did not see.
#pragma once

#include <vector>

#include "tools/saap/folded_mlp.h"
#include "tools/saap/prompt_head.h"

namespace keyhole::tools {

/// Figures for probing the partitions that hold `share` of the keys: the share of the long-range attention that lies
/// in them, as the mean over the late queries weighted by how much of it each has. A group's heads choose together.
struct ProbeFigures {
  double share = 0;
  double classifier = 0;  ///< chosen by the classifier's attention per key, as `saap` does
  double centroids = 0;   ///< by their mean keys, as `ivf` does
  double best = 0;        ///< by their true attention per key: what these partitions allow
};

[[nodiscard]] std::vector<ProbeFigures> measure_probing(const std::vector<PromptHead>& prompts,
                                                        const FoldedMlp& mlp);

}  // namespace keyhole::tools
