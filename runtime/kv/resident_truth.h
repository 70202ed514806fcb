// Exact attention over the resident tokens of a session on a device, by the host's copy of them: what an audit holds
// against the device's own.
#pragma once

#include <array>
#include <vector>

#include "gpu/step.h"
#include "runtime/engine/engine.h"

namespace keyhole::runtime {

/// From the thread that keeps the host's copy.
class ResidentTruth {
 public:
  /// Engine and steps outlive it.
  ResidentTruth(const Engine& engine, gpu::StreamSteps& steps);

  /// Of the layer's resident tokens as they are now, for queries `[group, head_dim]`: o `[group, head_dim]`, lse
  /// `[group]`, valid until the next call.
  [[nodiscard]] StateView state(uint32_t layer, uint32_t kv_head, const float* queries);

 private:
  struct State {
    std::vector<float> o, lse;
    [[nodiscard]] StateView view() { return {o.data(), lse.data()}; }
  };
  const Engine* engine_;
  gpu::StreamSteps* steps_;
  std::array<State, 3> pieces_;
  State merged_;
};

}  // namespace keyhole::runtime
