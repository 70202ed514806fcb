// A device with streams for a model whose layers have different shapes.
#pragma once

#include "runtime/engine/engine.h"

namespace keyhole::runtime {

/// The device, of which sessions have parts for each shape (gpu/mixed_parts.h), made by `device`.
[[nodiscard]] StreamDevice for_mixed_layers(StreamDevice device);

}  // namespace keyhole::runtime
