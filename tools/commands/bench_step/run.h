// The work of bench-step: fills a session with the context, builds its indexes, and times decoding steps.
#pragma once

#include <memory>
#include <string>

#include "tools/commands/bench_step/head_source.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/bench_step/results.h"

namespace keyhole::tools {

class StepBench {
 public:
  /// Makes the engine and tries every index and budget: throws UsageError for what the library refuses as an
  /// argument. `source` must outlive the object.
  StepBench(const HeadSource& source, StepPlan plan, StepListener listener);
  ~StepBench();
  StepBench(const StepBench&) = delete;
  StepBench& operator=(const StepBench&) = delete;

  /// Runs all measurements in turn. Throws LibraryError, std::runtime_error, Interrupted.
  void run();

  [[nodiscard]] const StepPlan& plan() const;      ///< with the values in effect
  [[nodiscard]] const StepFloors& floors() const;  ///< complete after run()
  [[nodiscard]] std::string cpu_level() const;
  [[nodiscard]] bool stream_steps() const;
  [[nodiscard]] uint32_t context_block() const;  ///< of ranks that share the tokens; else 0

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole::tools
