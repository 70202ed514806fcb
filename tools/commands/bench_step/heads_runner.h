// Decoding steps of bench-step by ranks that share the heads: each attends with its own heads, and all get the
// outputs of all.
#pragma once

#include <memory>

#include "tools/commands/bench_step/step_ranks.h"
#include "tools/commands/bench_step/step_runner.h"

namespace keyhole::tools {

/// Makes a runner that calls keyhole_session_attend for this rank's heads, with tensors in host memory, and gathers the
/// outputs of all ranks; both are in a layer's time. `inputs` are of this rank's heads; output() gives those of all.
/// Where one rank cannot attend, run() throws on all. The arguments must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_heads_runner(const StepInputs& inputs,
                                                            const StepRanks& ranks);

}  // namespace keyhole::tools
