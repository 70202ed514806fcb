// The steps of a spread session that the last graph capture of its stream recorded (SpreadSession::announce()). What a
// rank does in a step depends on whose the token is that it appends: a graph stands for tokens of the same owner alone,
// and all ranks capture again at the end of a block, as NCCL wants captures of all ranks to be alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

/// What a rank does in a step.
struct RankPart {
  uint32_t owner = 0;  ///< the rank that takes the new token; 0: there is none
  bool takes = false;  ///< the new token is its own
  bool asks = false;   ///< it has tokens to attend
  bool operator==(const RankPart&) const = default;
};

struct SpreadGraphStep {
  uint32_t layer = 0;
  bool appends = false;  ///< on the rank that the token is of
  RankPart part;
  TensorOut out;
  float* lse = nullptr;
};

class SpreadGraph {
 public:
  /// A step is being recorded in the capture with this number (gpu::StreamSteps::capture_id, not 0): forgets any other.
  void enter(uint64_t capture) {
    if (capture == capture_) return;
    capture_ = capture;
    is_spoiled_ = false;
    steps_.clear();
  }
  void add(const SpreadGraphStep& step) { steps_.push_back(step); }
  /// A step was recorded in part: the graph cannot be launched.
  void spoil() { is_spoiled_ = true; }

  /// Tokens that its steps append to a layer.
  [[nodiscard]] uint32_t appended(uint32_t layer) const {
    uint32_t n = 0;
    for (const SpreadGraphStep& step : steps_) n += step.layer == layer && step.appends ? 1 : 0;
    return n;
  }
  [[nodiscard]] std::span<const SpreadGraphStep> steps() const { return steps_; }
  /// Whether a capture was recorded without a failure.
  [[nodiscard]] bool is_whole() const { return !is_spoiled_ && !steps_.empty(); }
  /// Throws Error(invalid_argument) where nothing was captured, or only in part.
  void check() const {
    if (is_spoiled_) {
      throw Error(Status::invalid_argument,
                  "a call failed while the graph was captured: capture it again");
    }
    if (steps_.empty()) {
      throw Error(Status::invalid_argument, "no step was captured on the session's stream");
    }
  }

 private:
  uint64_t capture_ = 0;
  bool is_spoiled_ = false;
  std::vector<SpreadGraphStep> steps_;
};

}  // namespace keyhole::runtime
