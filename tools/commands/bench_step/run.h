// The work of bench-step: fills a session with the context, builds its indexes, and times decoding steps.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/bench_step/step_data.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/library.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// What is measured, with everything filled in.
struct StepPlan {
  StepShape shape;
  uint64_t context = 0;
  uint32_t sink = 128, window = 512;
  uint32_t steps = 32, warmup = 8;
  uint32_t audit_steps = 8;  ///< 0: no figures of quality
  uint32_t training_queries = 4096;
  TurnKind turn = TurnKind::permute;
  uint64_t seed = 1;
  std::vector<std::string> indexes;
  std::vector<BudgetChoice> budgets;
  keyhole_device device = KEYHOLE_DEVICE_AUTO;
  keyhole_signal signal = KEYHOLE_SIGNAL_AUTO;
  keyhole_placement partitions = KEYHOLE_PLACE_AUTO;
  uint32_t device_ordinal = 0;
  uint32_t threads = 0;
  bool weights = false;
  bool blocking = false;  ///< tensors in host memory and a call that waits, also on a CUDA device
  bool graph = false;
  uint64_t device_cap = 0, host_cap = 0;  ///< bytes; 0: none
  bool compare_full = false, compare_resident = false, compare_pcie = false;
};

/// Of a sample, mostly of microseconds.
struct Latency {
  double mean = 0, p50 = 0, p95 = 0, p99 = 0;
};
[[nodiscard]] Latency latency_of(std::vector<double> sample);

struct Phase {
  std::string name;
  double seconds = 0;
};

/// What a way of attending costs.
struct StepTiming {
  Latency layer;  ///< of one attend: on the device's clock for stream steps, else of the call
  Latency token;  ///< of all of a token, by the host's clock
  Latency token_on_device;          ///< by the device's clock; zeros where that has none
  keyhole_statistics statistics{};  ///< of the measured steps
};

/// One row of the result.
struct StepResult {
  std::string name;  ///< index and budget, or what it is compared with
  std::string index, attend, tail, target;
  uint32_t min_keys = 0;  ///< of a tail without a target
  bool comparison = false;
  double build_seconds = 0,
         tail_seconds = 0;  ///< of the index and of the partitions; 0 where they were there
  std::optional<StepTiming> timing;     ///< absent where it could not be measured
  std::string note;                     ///< why not, or what has to be known
  std::optional<keyhole_audit> audit;   ///< of the same steps with tensors in host memory
  std::optional<Latency> stream_error;  ///< output error of what stream steps wrote, in fp16
};

/// What the machine can do at best.
struct StepFloors {
  std::string device;              ///< e.g. "NVIDIA H200"
  uint64_t weight_bytes = 0;       ///< read by each token
  double copy_bandwidth = 0;       ///< bytes/s on the device, read and written; 0 without one
  double host_copy_bandwidth = 0;  ///< bytes/s from pinned memory
  uint64_t layer_bytes = 0;        ///< keys and values of a layer
  std::optional<Latency> dense;    ///< of a token without attends
};

/// Told as soon as something is known.
struct StepListener {
  std::function<void(const Phase&)> phase;
  std::function<void(const StepResult&)> result;
  std::function<void(const std::string&)> log;
};

class StepBench {
 public:
  /// Makes the engine and tries every index and budget: throws UsageError for what the library refuses as an
  /// argument. `source` must outlive the object.
  StepBench(const HeadSource& source, StepPlan plan, StepListener listener);
  ~StepBench();
  StepBench(const StepBench&) = delete;
  StepBench& operator=(const StepBench&) = delete;

  /// Everything, in turn. Throws LibraryError, std::runtime_error, Interrupted.
  void run();

  [[nodiscard]] const StepPlan& plan() const;      ///< with the values in effect
  [[nodiscard]] const StepFloors& floors() const;  ///< complete after run()
  [[nodiscard]] std::string cpu_level() const;
  [[nodiscard]] bool stream_steps() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole::tools
