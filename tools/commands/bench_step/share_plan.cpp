#include "tools/commands/bench_step/share_plan.h"

#include "tools/terminal/errors.h"

namespace keyhole::tools {

void share_plan(StepPlan& plan, const ParallelFlags& flags) {
  if (flags.kind.empty()) return;
  if (plan.graph || plan.weights) {
    throw UsageError(std::string(plan.graph ? "--graph" : "--weights") + " with --parallel " +
                     flags.kind +
                     ": steps of several ranks have their tensors in host memory; allowed: one of "
                     "the two");
  }
  plan.ranks = StepRanks(cache_ranks(flags, KEYHOLE_DEVICE_HOST, RanksOn::host));
  (void)plan.own_shape();  // the ranks divide the heads
  plan.blocking = true;
}

}  // namespace keyhole::tools
