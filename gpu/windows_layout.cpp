#include "gpu/windows_layout.h"

#include <algorithm>
#include <string>

#include "gpu/layer_kinds.h"

namespace keyhole::gpu {
namespace {

size_t aligned(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// Throws Error(invalid_argument) where the rings would pass 2^62 bytes.
void check_size(const WindowsShape& s) {
  using Wide = unsigned __int128;
  Wide slots = 0;
  for (const WindowsShape::Layer& layer : s.layers) slots += layer.slots;
  const Wide bytes = slots * 2 * s.kv_heads * s.head_dim * dtype_size(s.dtype);
  if (bytes >> 62U != 0) {
    throw Error(Status::invalid_argument, "sliding windows on a device would pass 2^62 bytes");
  }
}

ResidentShape resident_of(const WindowsShape& s) {
  check_size(s);

  ResidentShape r;
  r.layers = static_cast<uint32_t>(s.layers.size());
  r.q_heads = s.q_heads;
  r.kv_heads = s.kv_heads;
  r.head_dim = s.head_dim;
  r.dtype = s.dtype;
  return r;
}

}  // namespace

WindowsLayout::WindowsLayout(const WindowsShape& s)
    : places(s.layers.size()),
      group_of(s.layers.size()),
      resident(resident_of(s)),
      scratch(resident) {
  for (const WindowsShape::Layer& layer : s.layers) {
    const bool is_there = std::any_of(groups.begin(), groups.end(),
                                      [&](const Group& g) { return g.slots == layer.slots; });
    if (!is_there) groups.push_back({layer.slots});
  }
  const size_t slot = size_t{2} * s.kv_heads * s.head_dim * dtype_size(s.dtype);
  size_t end = aligned(scratch.bytes());
  uint32_t place = 0;
  for (uint32_t g = 0; g < groups.size(); ++g) {
    Group& group = groups[g];
    group.first = place;
    group.kv = end;
    group.layer_bytes = group.slots * slot;
    for (uint32_t layer = 0; layer < s.layers.size(); ++layer) {
      if (s.layers[layer].slots != group.slots) continue;
      places[layer] = place++;
      group_of[layer] = g;
    }
    group.count = place - group.first;
    end += aligned(group.count * group.layer_bytes);
  }
  end_states = end;
  const size_t heads = s.kv_heads == 0 ? 0 : s.q_heads / s.kv_heads;
  end_state_bytes = aligned(heads * (size_t{s.head_dim} + 1) * sizeof(float));
  bytes = end_states + s.layers.size() * s.kv_heads * end_state_bytes;
}

size_t windows_bytes(const WindowsShape& shape) {
  return sum_of_parts(parts_of(shape),
                      [](const WindowsShape& part) { return WindowsLayout(part).bytes; });
}

}  // namespace keyhole::gpu
