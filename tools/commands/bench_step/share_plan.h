// A plan of bench-step for the ranks of `--parallel`.
#pragma once

#include "tools/commands/bench_step/plan.h"
#include "tools/commands/common/parallel.h"

namespace keyhole::tools {

/// Shares the plan among the processes that mpirun has started; their steps have tensors in host memory. Throws
/// UsageError for what ranks cannot do, std::runtime_error where the build has no MPI.
void share_plan(StepPlan& plan, const ParallelFlags& flags);

}  // namespace keyhole::tools
