#include "runtime/engine/mixed_device.h"

#include <utility>

#include "gpu/mixed_parts.h"

namespace keyhole::runtime {

StreamDevice for_mixed_layers(StreamDevice device) {
  StreamDevice mixed = device;
  mixed.make_resident = [make = device.make_resident](
                            const gpu::ResidentShape& shape,
                            const std::shared_ptr<gpu::SessionOnDevice>& session) {
    return gpu::make_mixed_resident(
        shape, [&](const gpu::ResidentShape& part) { return make(part, session); });
  };
  if (device.make_codes) {
    mixed.make_codes = [make = device.make_codes](gpu::Resident& resident,
                                                  const gpu::CodesShape& shape) {
      return gpu::make_mixed_codes(resident, shape, make);
    };
  }
  if (device.make_blocked) {
    // Of one shape: there is one for each.
    mixed.make_blocked = [make = device.make_blocked](gpu::Resident& resident,
                                                      const gpu::BlockedShape& shape) {
      return make(gpu::some_part(resident), shape);
    };
  }
  if (device.make_windows) {
    mixed.make_windows = [make = device.make_windows](gpu::Resident& resident,
                                                      const gpu::WindowsShape& shape) {
      return gpu::make_mixed_windows(resident, shape, make);
    };
  }
  return mixed;
}

}  // namespace keyhole::runtime
