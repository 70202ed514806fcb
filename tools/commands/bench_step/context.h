// Brings the context of a model in bench-step into sessions.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tools/commands/bench_step/head_source.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/bench_step/step_data.h"
#include "tools/commands/bench_step/step_runner.h"
#include "tools/llama/team.h"

namespace keyhole::tools {

/// Makes keys, values and queries a chunk of tokens at a time, so that no layer ever lies in memory beside the
/// session that takes it.
class ContextFeed {
 public:
  /// The arguments must outlive the object.
  ContextFeed(const HeadSource& source, const StepPlan& plan, Team& team)
      : source_(source), plan_(plan), team_(team) {}

  /// Takes K and V of the next chunk of a layer, and the queries that may guide an index, or null.
  using Take = std::function<void(uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
                                  const keyhole_tensor* q)>;

  /// Hands the context over layer by layer, with a progress bar. `steps` not null: there are queries, and the tokens
  /// of the decoding steps are noted in it. Returns the seconds that it took to make the numbers.
  double hand_over(const std::string& title, StepInputs* steps, const Take& take);

 private:
  double hand_over_layer(LayerData& data, uint32_t layer, bool with_queries, const Take& take);

  const HeadSource& source_;
  const StepPlan& plan_;
  Team& team_;
  std::vector<uint16_t> k_, v_, q_;  // of a chunk
};

}  // namespace keyhole::tools
