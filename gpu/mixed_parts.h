// What a session with layers of different shapes has on a device: of each part one for each shape (gpu/layer_kinds.h),
// behind the interface of one, which takes the model's numbers of layers. A step goes to the parts of its layer's shape
// as it is: nothing is added to its work on the stream. The parts count against one limit of memory (SessionOnDevice).
//
// `device` makes the parts, by shapes of layers that are alike; these functions throw as it does. What is made for a
// mixed Resident is for its steps alone, and destroyed before it.
#pragma once

#include <memory>

#include "gpu/device.h"
#include "gpu/layer_kinds.h"

namespace keyhole::gpu {

/// Some layer has resident tokens.
[[nodiscard]] std::unique_ptr<Resident> make_mixed_resident(
    const Device& device, const ResidentShape& shape,
    const std::shared_ptr<SessionOnDevice>& session);
/// Some layer has codes. resident: from make_mixed_resident(), with the same shapes of layers.
[[nodiscard]] std::unique_ptr<Codes> make_mixed_codes(const Device& device, Resident& resident,
                                                      const CodesShape& shape);
/// resident: from make_mixed_resident(), whatever its shapes.
[[nodiscard]] std::unique_ptr<Windows> make_mixed_windows(const Device& device, Resident& resident,
                                                          const WindowsShape& shape);

}  // namespace keyhole::gpu
