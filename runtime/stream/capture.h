// The steps that the last graph capture recorded, from the first of them to the launches that are announced.
//
// CUDA numbers captures (gpu::StreamSteps::capture_id). A step with another number than the one before belongs to a new
// capture, which replaces the old one: so a capture that failed and is tried again, or two in a row, never add up.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/stream/stream_server.h"

namespace keyhole::runtime {

/// What a graph has in it beside its steps. Another value: the graph must be captured again.
struct GraphVersion {
  uint64_t settings = 0;  ///< stream and mode
  uint64_t codes = 0;     ///< the layers that have codes on the device, and where these lie
  bool operator==(const GraphVersion&) const = default;
};

class Capture {
 public:
  /// A step is being recorded in the capture `id` (not 0): forgets what another capture holds.
  void enter(uint64_t id, const GraphVersion& version) {
    if (id == id_) return;
    id_ = id;
    version_ = version;
    is_spoiled_ = false;
    steps_.clear();
  }
  /// Adds a step to the capture that was entered.
  void add(const StreamStep& step) { steps_.push_back(step); }
  /// A step was recorded in part: the graph cannot be launched.
  void spoil() { is_spoiled_ = true; }

  [[nodiscard]] uint64_t id() const { return id_; }  ///< 0: nothing was ever captured
  [[nodiscard]] bool is_spoiled() const { return is_spoiled_; }
  [[nodiscard]] const GraphVersion& version() const { return version_; }
  [[nodiscard]] std::span<const StreamStep> steps() const { return steps_; }

 private:
  uint64_t id_ = 0;
  GraphVersion version_;
  bool is_spoiled_ = false;
  std::vector<StreamStep> steps_;
};

}  // namespace keyhole::runtime
