// The results of bench-step.
#pragma once

#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace keyhole::tools {

/// Figures of a sample, mostly of microseconds.
struct Latency {
  double mean = 0, p50 = 0, p95 = 0, p99 = 0;
};
[[nodiscard]] Latency latency_of(std::vector<double> sample);

struct Phase {
  std::string name;
  double seconds = 0;
};

/// Bytes of memory that a session takes on one of several ranks.
struct RankMemory {
  uint64_t host = 0, index = 0, device = 0, pinned = 0;
};

/// The cost of a way to attend. If several ranks measure together, the times are those of the slowest.
struct StepTiming {
  Latency layer;  ///< of one attend: on the device's clock for stream steps, else of the call
  Latency token;  ///< of all of a token, by the host's clock
  Latency token_on_device;  ///< by the device's clock; zeros where that has none
  double layer_in_token =
      0;  ///< microseconds, its median by layers; 0: no clock, or products between the attends
  /// Statistics of the measured steps. Over several ranks they are added up, except wall time and what all have
  /// alike.
  keyhole_statistics statistics{};
  std::vector<RankMemory> ranks;  ///< by rank; empty: one process
  std::optional<double>
      busy_bandwidth;  ///< bytes/s that the threads of --busy read and wrote meanwhile
};

/// One row of the result.
struct StepResult {
  std::string name;    ///< index and budget, or what it is compared with
  std::string series;  ///< the --index that it comes from, perhaps a sweep
  std::string index, attend, tail, target;
  uint32_t min_keys = 0;  ///< of a tail without a target
  bool comparison = false;
  bool floor = false;        ///< computed from bytes and a measured bandwidth: no kernel was timed
  double build_seconds = 0;  ///< of the index; 0 where it was there
  double tail_seconds = 0;   ///< of the partitions; likewise
  std::optional<StepTiming> timing;    ///< absent where it could not be measured
  std::string note;                    ///< why not, or what has to be known
  std::optional<keyhole_audit> audit;  ///< of the same steps
  /// Microseconds in which a copy within the device moves as many bytes as the codes of a layer have, where the device
  /// attends all layers by codes: the floor of a step that reads them all.
  std::optional<double> codes_floor;
  /// Output error of what the steps wrote in fp16, for stream steps and for several ranks together.
  std::optional<Latency> written_error;
};

/// A layer's median as close together as it was measured: in a graph of layers, else clocked by itself.
[[nodiscard]] inline double layer_time(const StepTiming& timing) {
  return timing.layer_in_token > 0 ? timing.layer_in_token : timing.layer.p50;
}

/// The best that the machine can do.
struct StepFloors {
  std::string device;              ///< e.g. "NVIDIA H200"
  uint64_t weight_bytes = 0;       ///< read by each token
  double copy_bandwidth = 0;       ///< bytes/s on the device, read and written; 0 without one
  double host_copy_bandwidth = 0;  ///< bytes/s from pinned memory
  uint64_t layer_bytes = 0;        ///< keys and values of a layer
  std::optional<Latency> dense;    ///< of a token without attends
};

/// Callbacks for results, called as soon as something is known.
struct StepListener {
  std::function<void(const Phase&)> phase;
  std::function<void(const StepResult&)> result;
  std::function<void(const std::string&)> log;
};

}  // namespace keyhole::tools
