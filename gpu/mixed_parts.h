// What a session with layers of different shapes has on a device: of each part one for each shape (gpu/layer_kinds.h), behind the
// interface of one, which takes the model's numbers of layers. A step goes to the parts of its layer's shape as it is: nothing
// is added to its work on the stream. The parts count against one limit of memory (SessionOnDevice).
//
// `make` makes the parts, by shapes of layers that are alike; it throws as they do. What is made for a mixed Resident is for its
// steps alone, and destroyed before it.
#pragma once

#include <functional>
#include <memory>

#include "gpu/layer_kinds.h"

namespace keyhole::gpu {

using MakeResident = std::function<std::unique_ptr<Resident>(const ResidentShape&)>;
using MakeCodes = std::function<std::unique_ptr<Codes>(Resident&, const CodesShape&)>;
using MakeWindows = std::function<std::unique_ptr<Windows>(Resident&, const WindowsShape&)>;

/// Of a device with streams. Some layer has resident tokens.
[[nodiscard]] std::unique_ptr<Resident> make_mixed_resident(const ResidentShape& shape,
                                                            const MakeResident& make);
/// One of its parts, for what needs a Resident of the session for its device and its memory.
[[nodiscard]] Resident& some_part(Resident& mixed);

// resident: from make_mixed_resident(), with the same shapes of layers; of windows any.
/// Some layer has codes.
[[nodiscard]] std::unique_ptr<Codes> make_mixed_codes(Resident& resident, const CodesShape& shape,
                                                      const MakeCodes& make);
[[nodiscard]] std::unique_ptr<Windows> make_mixed_windows(Resident& resident,
                                                          const WindowsShape& shape,
                                                          const MakeWindows& make);

}  // namespace keyhole::gpu
