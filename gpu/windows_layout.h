// Where the parts of sliding layers' device memory lie, in bytes. Arithmetic only: planning needs no device.
//
// Layers with rings of the same size lie side by side, so that one launch serves all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/resident_layout.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

struct WindowsLayout {
  explicit WindowsLayout(const WindowsShape& shape);

  /// Layers with rings of one size.
  struct Group {
    uint32_t slots = 0;
    uint32_t first = 0, count = 0;  ///< places
    size_t kv = 0;                  ///< of the first; per KV head K `[slots, head_dim]`, then V
    size_t layer_bytes = 0;         ///< to the next
  };
  std::vector<uint32_t> places;    ///< layer -> place among all: where its states are
  std::vector<uint32_t> group_of;  ///< layer -> group
  std::vector<Group> groups;
  size_t end_states, end_state_bytes;  ///< what stands in place of the host's states; of a KV head
  size_t bytes;
  ResidentShape resident;  ///< as the attention over these layers sees it: no tokens of its own
  ScratchLayout scratch;   ///< lies first

  [[nodiscard]] size_t kv(uint32_t layer) const {
    const Group& g = groups[group_of[layer]];
    return g.kv + (places[layer] - g.first) * g.layer_bytes;
  }
  /// Of a layer: per KV head o `[group, head_dim]`, all 0, and lse `[group]`, its learned sinks or -infinity.
  [[nodiscard]] size_t end_state(uint32_t layer, uint32_t kv_head) const {
    return end_states + (size_t{layer} * resident.kv_heads + kv_head) * end_state_bytes;
  }
};

}  // namespace keyhole::gpu
