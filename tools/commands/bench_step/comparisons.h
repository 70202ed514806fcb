// What bench-step compares indexes with: attention to everything without a search, and the cost of copies.
#pragma once

#include "tools/api/handles.h"
#include "tools/commands/bench_step/context.h"
#include "tools/commands/bench_step/meter.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/bench_step/results.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// Measures comparisons. Each becomes a result of its own, whose note says why where it could not be measured. Throws
/// Interrupted.
class StepComparisons {
 public:
  /// The arguments must outlive the object. `stream` null: there is no CUDA device, or it is not used.
  StepComparisons(const StepPlan& plan, StepMeter& meter, TokenStream* stream, StepFloors& floors,
                  const StepListener& listener)
      : plan_(plan), meter_(meter), stream_(stream), floors_(floors), listener_(listener) {}

  /// Attends by `mode` in a session that goes back to its indexes afterwards.
  void attend_by(keyhole_mode mode, const Session& session, const std::string& name,
                 const std::string& note) const;
  /// Times copies alone, of the keys and values of each layer from pinned memory. Notes their bandwidth among the
  /// floors.
  void copy_over_pcie() const;
  /// Computes the time that the bytes of K and V in this format take at the device's copy bandwidth: a floor, nothing
  /// is timed.
  void format_floor(KvFormat format) const;
  /// Times exact attention on the device, in a session whose window holds everything. `config` is that of the
  /// measured sessions.
  void attend_on_device(const Engine& engine, keyhole_session_config config,
                        ContextFeed& context) const;

 private:
  const StepPlan& plan_;
  StepMeter& meter_;
  TokenStream* stream_;
  StepFloors& floors_;
  const StepListener& listener_;
};

}  // namespace keyhole::tools
