// One or several new tokens of each of several sessions with tensors in device memory, each on the stream of its
// session (keyhole_session_extend_batch). Sessions that have a stream in common take their steps together: those over
// codes on the device by one launch for all that are alike (gpu/step_group.h).
//
//   prepare   each waits for the host's part of its step before, for memory to be pinned, for an index
//   add       no step waits in the group for more than the calls of the others
//   launch    what failed to be launched has failed for each of its members
//   the rest  members of many tokens, whose steps wait for one another, and attention of blocks
#pragma once

#include <exception>
#include <span>

#include "runtime/session/device_extender.h"

namespace keyhole::runtime {

struct DeviceMember {
  DeviceExtender* session = nullptr;
  const ExtendArgs* args = nullptr;
  std::exception_ptr* error = nullptr;  ///< why it has failed
};
/// Extends different sessions of one engine, each with new tokens of the layer. Memory is taken before any session
/// changes: from then on only members can fail.
void extend_batch_on_device(uint32_t layer, std::span<const DeviceMember> members);

}  // namespace keyhole::runtime
