// The steps that graph captures recorded, from the first of them to the launches that are announced.
//
// CUDA numbers captures (gpu::StreamSteps::capture_id). A step with another number than the one before belongs to a new
// capture: so a capture that failed and is tried again, or two in a row, never add up.
#pragma once

#include <cstddef>
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
  Capture() = default;
  Capture(uint64_t id, const GraphVersion& version) : id_(id), version_(version) {}
  /// Adds a step.
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

/// The newest captures of a session: graphs for different numbers of tokens, say.
class Captures {
 public:
  static constexpr size_t kMost = 16;

  /// A step is being recorded in the capture `id` (not 0). Forgets the oldest where there are kMost others.
  void enter(uint64_t id, const GraphVersion& version) {
    if (id == newest().id()) return;
    if (known_.size() > kMost) known_.erase(known_.begin() + 1);
    known_.emplace_back(id, version);
  }
  /// The one that was entered last; an empty one where there was none.
  [[nodiscard]] Capture& newest() { return known_.back(); }
  [[nodiscard]] const Capture& newest() const { return known_.back(); }
  /// Null: it is not known, or not any more.
  [[nodiscard]] const Capture* find(uint64_t id) const {
    for (const Capture& capture : known_) {
      if (capture.id() == id) return &capture;
    }
    return nullptr;
  }

 private:
  std::vector<Capture> known_{
      Capture()};  ///< the first is empty, the others in the order of their recording
};

}  // namespace keyhole::runtime
