#include "gpu/device_slowness.h"

namespace keyhole::gpu {
namespace {

// Multiplications of fp16 with sums in fp32 that a multiprocessor has in a cycle: of data centres (8.0, 9.0, 10.0,
// 10.3), and of GPUs for desktops (8.6, 8.9, 12.0), of which some have twice as many.
constexpr double kProducts = 1024.0, kProductsOfDesktops = 256.0;
// Of them that the kernels of all devices come to: on an H200 a half of heads of 128 components, where shared memory is
// as much of a limit (bench/RESULTS.md, "On other cards"); it should be more where there are fewer, as on desktops.
constexpr double kShare = 0.6;
constexpr double kOperationsOfH100 =
    460e6;  // in a microsecond, by those of 9.0 (bench/RESULTS.md, "Turns by codes")
constexpr double kMemoryBytesOfH100 = 3.35e6;  // in a microsecond
// Copies come to 25 GB/s over 16 lanes of PCIe 4, which is what 8.x has; later ones have PCIe 5, and hosts either.
constexpr double kBusOfPcie4 = 40.0 / 25.0;

bool is_desktop(int major, int minor) { return major > 10 || (major == 8 && minor != 0); }

}  // namespace

DeviceSlowness slowness_of(const DeviceFigures& device, bool hopper) {
  DeviceSlowness slowness;
  if (!hopper) {
    const double cycles = device.clock_khz / 1000.0;  // in a microsecond
    const double products =
        is_desktop(device.major, device.minor) ? kProductsOfDesktops : kProducts;
    slowness.products = kOperationsOfH100 / (kShare * 2.0 * products * cycles * device.processors);
  }
  const double bytes =
      2.0 * (device.memory_clock_khz / 1000.0) * (device.memory_width_bits / 8.0);  // in a us
  if (bytes > 0.0) slowness.memory = kMemoryBytesOfH100 / bytes;
  if (device.major == 8) slowness.bus = kBusOfPcie4;
  return slowness;
}

}  // namespace keyhole::gpu
