// How many tokens steps that were submitted offload to host memory, known before they are served.
//
// A step must be refused before the session would pass its host_memory_limit, and yet must not wait for the steps
// before it. Which tokens leave the window depends on counts alone: a token goes to the sink until that is full, then
// to the window; a full window first falls back to its W - 1 newest tokens. So the counts are kept here as they will
// be, from a moment when no step was under way.
#pragma once

#include <cstdint>
#include <vector>

namespace keyhole::runtime {

/// Tokens of a layer that lie on the device.
struct ResidentCounts {
  uint32_t sink = 0;
  uint32_t window = 0;
};

class OffloadForecast {
 public:
  OffloadForecast(uint32_t layers, uint32_t sink, uint32_t window, uint32_t window_capacity)
      : sink_(sink), window_(window), capacity_(window_capacity), layers_(layers) {}

  /// Begins anew with a layer's counts.
  void reset(uint32_t layer, const ResidentCounts& now) { layers_[layer] = now; }

  /// Tokens that `appended` more tokens make the layer offload.
  [[nodiscard]] uint64_t offloaded(uint32_t layer, uint64_t appended) const {
    const ResidentCounts& now = layers_[layer];
    const uint64_t to_sink = now.sink < sink_ ? sink_ - now.sink : 0;
    const uint64_t free = capacity_ - now.window;
    if (appended <= to_sink + free) return 0;
    // After an overflow the window holds W tokens and takes capacity - W more.
    const uint64_t beyond = appended - to_sink - free;
    const uint64_t per_overflow = capacity_ - window_ + 1;
    return (beyond + per_overflow - 1) / per_overflow * per_overflow;
  }
  /// A step that appends a token was submitted.
  void append(uint32_t layer) {
    ResidentCounts& now = layers_[layer];
    if (now.sink < sink_) {
      now.sink += 1;
    } else {
      now.window = now.window == capacity_ ? window_ : now.window + 1;
    }
  }

 private:
  uint32_t sink_, window_, capacity_;
  std::vector<ResidentCounts> layers_;
};

}  // namespace keyhole::runtime
