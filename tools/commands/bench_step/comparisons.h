// What bench-step puts beside the indexes: attention without a search, to everything, and what copies cost.
#pragma once

#include "tools/api/handles.h"
#include "tools/commands/bench_step/context.h"
#include "tools/commands/bench_step/meter.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/bench_step/results.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// Each becomes a result of its own, whose note says why where it could not be measured. Throws Interrupted.
class StepComparisons {
 public:
  /// What is referred to must outlive the object. `stream` null: there is no CUDA device, or it is not used.
  StepComparisons(const StepPlan& plan, StepMeter& meter, TokenStream* stream, StepFloors& floors,
                  const StepListener& listener)
      : plan_(plan), meter_(meter), stream_(stream), floors_(floors), listener_(listener) {}

  /// Attends by `mode` in a session that goes back to its indexes afterwards.
  void attend_by(keyhole_mode mode, const Session& session, const std::string& name,
                 const std::string& note) const;
  /// Keys and values of each layer copied from pinned memory: the time of the copies alone. Notes their bandwidth
  /// among the floors.
  void copy_over_pcie() const;
  /// The time that the bytes of K and V in this format take at the device's copy bandwidth: a floor, nothing is timed.
  void format_floor(KvFormat format) const;
  /// A session whose window holds everything: exact attention on the device. `config` is that of the sessions
  /// which are measured.
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
