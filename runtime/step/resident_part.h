// The resident tokens' share of a step, and the learned sinks: tasks where the host computes it, only a wait where
// the device does. New tokens of the step (step/new_tokens.h) belong to it; the host attends these.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "gpu/device.h"
#include "runtime/step/cost.h"
#include "runtime/step/new_tokens.h"
#include "runtime/step/result_sink.h"

namespace keyhole::runtime {

class ResidentPart {
 public:
  /// Memory for steps of up to kv_heads KV heads, `states` states and `numbers` components of these.
  ResidentPart(uint32_t kv_heads, size_t states, size_t numbers);

  /// Sets the shape of the steps from now on.
  void set_heads(uint32_t kv_heads, uint32_t dim) {
    kv_heads_ = kv_heads;
    dim_ = dim;
  }

  /// Begins a step, with codes as in gpu::Resident::attend_begin(); q `[kv_heads, group, head_dim]` stays valid until
  /// end(). fresh, where not null: the step's new tokens, valid as long; more than one of them may ask where the
  /// resident tokens lie in host memory (gpu::Resident::contiguous_rows()), and the group is then that of all. sinks,
  /// where not null: one for each query head of the model, valid as long, which the states then include (Codes have
  /// their own).
  void begin(gpu::Resident& resident, uint32_t layer, const float* q, uint32_t group,
             gpu::Codes* codes, const NewTokens* fresh, const float* sinks);
  /// Begins a step of one token without resident tokens; its states are those of the sinks, if there are any.
  void begin_without(uint32_t group, const float* sinks);
  [[nodiscard]] bool is_there() const { return resident_ != nullptr; }
  [[nodiscard]] bool has_state() const { return is_there() || sinks_ != nullptr; }

  /// Number of tasks for the host: one for each KV head, or none.
  [[nodiscard]] uint32_t tasks() const {
    if (!is_there()) return 0;
    return fresh_ != nullptr ? kv_heads_ : resident_->host_tasks();
  }
  /// Runs a task unless a worker has begun it.
  void run(uint32_t task, StepCost& cost);
  /// The state of a KV head while the step is under way; it is computed here unless a worker has begun it. Null where
  /// the device computes it, and where there is none.
  [[nodiscard]] StateView state_now(uint32_t kv_head, StepCost& cost);

  /// Ends the part after the tasks: waits for the device, and makes all states known.
  void end();
  [[nodiscard]] StateView state(uint32_t kv_head) { return states_.slot(kv_head); }
  /// The state of the new tokens alone, after their task; null: the step has none, or state() includes them.
  [[nodiscard]] StateView fresh_state(uint32_t kv_head) {
    return fresh_ != nullptr && !is_here_ ? fresh_states_.slot(kv_head) : StateView{};
  }
  [[nodiscard]] size_t bytes() const { return states_.bytes() + fresh_states_.bytes(); }

 private:
  struct Task {
    std::atomic<bool> taken{false}, done{false};
  };
  [[nodiscard]] bool run_untaken(uint32_t task, StepCost& cost);
  /// Attends the new tokens, and the resident ones where the host computes them.
  void attend_fresh(uint32_t kv_head);
  void attend_here(uint32_t kv_head, StateView out);
  /// Adds the head's sinks to the states of its asking tokens.
  void add_sinks(uint32_t kv_head, StateView states) const;

  gpu::Resident* resident_ = nullptr;
  ResultArrays states_, fresh_states_;
  uint32_t kv_heads_, group_ = 0, dim_ = 0;
  // Members of the step under way:
  uint32_t layer_ = 0;
  const float* q_ = nullptr;
  const float* sinks_ = nullptr;
  const NewTokens* fresh_ = nullptr;
  bool is_here_ = false;  ///< of a step with new tokens: its tasks attend the resident ones as well
  bool has_begun_ = false;         ///< Resident::attend_begin() was called
  std::unique_ptr<Task[]> tasks_;  // [the most kv_heads]
};

}  // namespace keyhole::runtime
