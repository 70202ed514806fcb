// Measurements of bench-step: how long steps take, and how far their answers are from exact attention.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/bench_step/results.h"
#include "tools/commands/bench_step/step_runner.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// Mean and quantiles of a sample; zeros for an empty one.
[[nodiscard]] Latency latency_of(std::vector<double> sample);

/// Measures steps. Each measurement decodes the same tokens and then truncates them away, so that the session ends as
/// it began.
class StepMeter {
 public:
  /// `stream` null: steps have their tensors in host memory. The arguments must outlive the object.
  StepMeter(const StepPlan& plan, const StepInputs& inputs, TokenStream* stream);

  /// Times the steps of all layers, beside the plan's busy threads.
  StepTiming time(const Session& session);
  /// Returns the library's audit of the same steps of the first `layers` layers. Not for ranks that share the tokens,
  /// because each would audit its own tokens alone.
  keyhole_audit audit(const Session& session, uint32_t layers);
  /// Returns the output error of what the steps wrote, rounded to fp16, against steps of the library in exact mode.
  Latency written_error(const Session& session, uint32_t layers);

 private:
  [[nodiscard]] uint32_t audited_tokens() const;
  void truncate(const Session& session) const;

  const StepPlan& plan_;
  const StepInputs& inputs_;
  std::unique_ptr<StepRunner> own_runner_;
  StepRunner& runner_;  ///< the same
};

}  // namespace keyhole::tools
