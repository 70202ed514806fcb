// The tokens that the last keyhole_session_extend of each layer has appended: what keyhole_session_accept may cut and
// reorder.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/kv/sequence.h"

namespace keyhole::runtime {

class ExtendedTokens {
 public:
  struct Extended {
    uint32_t before = 0;     ///< tokens that the layer held before
    uint32_t tokens = 0;     ///< 0: the layer takes no part
    bool on_stream = false;  ///< enqueued: not all of it may have been done
    bool changed = false;    ///< another call has changed the layer's tokens since
  };

  explicit ExtendedTokens(uint32_t layers) : layers_(layers) {}

  [[nodiscard]] uint32_t layers() const { return static_cast<uint32_t>(layers_.size()); }
  [[nodiscard]] bool takes_part(uint32_t layer) const { return layers_[layer].tokens != 0; }
  void set(uint32_t layer, uint32_t before, uint32_t tokens, bool on_stream) {
    layers_[layer] = {before, tokens, on_stream, false};
  }
  void clear(uint32_t layer) { layers_[layer] = {}; }
  /// The tokens of the layer change otherwise than by keyhole_session_extend.
  void note_change(uint32_t layer) { layers_[layer].changed = true; }
  /// The extend of all layers that took part; throws Error(invalid_argument) where they do not agree, or there is none.
  [[nodiscard]] Extended agreed(const Sequence& sequence) const;

 private:
  std::vector<Extended> layers_;
};

}  // namespace keyhole::runtime
