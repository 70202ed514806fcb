// What steps on a stream need of the sliding layers of a session: their tokens lie on the device, or are moved there.
#pragma once

#include <cstdint>

#include "gpu/windows.h"

namespace keyhole::runtime {

/// From the calling thread alone. Counts are those after all steps that were enqueued or announced: nothing of such a
/// step comes back to the host.
class StreamWindows {
 public:
  virtual ~StreamWindows() = default;

  /// Takes their steps; its memory is taken when it is first asked for. Throws Error: unsupported,
  /// out_of_device_memory, out_of_memory, device_error.
  [[nodiscard]] virtual gpu::Windows& on_device(uint32_t layer) = 0;
  /// The number by which that device part knows the layer.
  [[nodiscard]] virtual uint32_t number_on_device(uint32_t layer) const = 0;
  /// Moves the layer's tokens there, if they lie in host memory: no step of the layer is under way then. Throws
  /// likewise, and they have not moved then.
  virtual void move_to_device(uint32_t layer) = 0;
  /// Steps that append n tokens, or what drops n of the newest, were enqueued.
  virtual void note_appended(uint32_t layer, uint32_t n) = 0;
  virtual void note_dropped(uint32_t layer, uint32_t n) = 0;
  /// See gpu::Windows::failure().
  [[nodiscard]] virtual Status failure(std::string& text) = 0;
};

}  // namespace keyhole::runtime
