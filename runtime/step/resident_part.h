// The resident tokens' share of a step: tasks where the host computes it, nothing but a wait where the device does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "gpu/device.h"
#include "runtime/step/cost.h"
#include "runtime/step/result_sink.h"

namespace keyhole::runtime {

class ResidentPart {
 public:
  ResidentPart(uint32_t q_heads, uint32_t group, uint32_t dim);

  /// Begins a step, with codes as gpu::Resident::attend_begin(); q `[q_heads, head_dim]` stays valid until end().
  void begin(gpu::Resident& resident, uint32_t layer, const float* q, gpu::Codes* codes);
  /// Begins a step that has no resident part.
  void begin_without() { resident_ = nullptr; }
  [[nodiscard]] bool is_there() const { return resident_ != nullptr; }

  /// Tasks for the host, one for each KV head, or none.
  [[nodiscard]] uint32_t tasks() const { return is_there() ? resident_->host_tasks() : 0; }
  /// Runs a task unless a worker has begun it.
  void run(uint32_t task, StepCost& cost);
  /// The state of a KV head while the step is under way: run here unless a worker has begun it. Null where the device
  /// computes it.
  [[nodiscard]] StateView state_now(uint32_t kv_head, StepCost& cost);

  /// After the tasks: waits for the device, and makes all states known.
  void end() { resident_->attend_end(states_.all()); }
  [[nodiscard]] StateView state(uint32_t kv_head) { return states_.slot(kv_head); }
  [[nodiscard]] size_t bytes() const { return states_.bytes(); }

 private:
  struct Task {
    std::atomic<bool> taken{false}, done{false};
  };
  [[nodiscard]] bool run_untaken(uint32_t task, StepCost& cost);

  gpu::Resident* resident_ = nullptr;
  ResultArrays states_;
  uint32_t kv_heads_;
  std::unique_ptr<Task[]> tasks_;  // [kv_heads]
};

}  // namespace keyhole::runtime
