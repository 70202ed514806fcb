// How fast a device attends many new tokens, and reads its own memory, estimated from what it says of itself: for
// choices between ways of which each is bound by something else.
#pragma once

namespace keyhole::gpu {

/// How many times as long as an H100 a device takes for a thing.
struct DeviceSlowness {
  double products = 1.0;  ///< many query rows, by BlockedAttention's kernels over rows or codes
  double memory = 1.0;    ///< bytes of its own memory
  double bus = 1.0;       ///< bytes of pinned memory, over a bus of PCIe 4 to 5
};

/// What a CUDA device says of itself.
struct DeviceFigures {
  int major = 0, minor = 0;  ///< compute capability
  int clock_khz = 0;
  int processors = 0;  ///< multiprocessors
  int memory_clock_khz =
      0;  ///< of two transfers each; 0: not said, as where memory is shared with the host
  int memory_width_bits = 0;  ///< likewise
};

/// hopper: the kernels are those of 9.0 alone; else those that all devices have. A memory that says nothing counts as
/// an H100's.
[[nodiscard]] DeviceSlowness slowness_of(const DeviceFigures& device, bool hopper);

}  // namespace keyhole::gpu
