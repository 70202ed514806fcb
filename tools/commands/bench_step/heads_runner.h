// Decoding steps of bench-step by ranks that share the heads: each attends with its own, and all get the outputs of all.
#pragma once

#include <memory>

#include "tools/commands/bench_step/step_ranks.h"
#include "tools/commands/bench_step/step_runner.h"

namespace keyhole::tools {

/// keyhole_attend of this rank's heads with tensors in host memory, and a gather of the outputs of all ranks, which a layer's
/// time contains. `inputs` are of this rank's heads; output() gives those of all. Where a rank cannot attend, run() throws on
/// all. What is referred to must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_heads_runner(const StepInputs& inputs,
                                                            const StepRanks& ranks);

}  // namespace keyhole::tools
