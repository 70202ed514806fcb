// A device for a model whose layers have different shapes.
#pragma once

#include <memory>

#include "gpu/device.h"

namespace keyhole::gpu {

/// `device`, on which sessions have a part for each shape of their layers (gpu/mixed_parts.h). All else is made as
/// `device` makes it.
[[nodiscard]] std::shared_ptr<const Device> for_mixed_layers(std::shared_ptr<const Device> device);

}  // namespace keyhole::gpu
