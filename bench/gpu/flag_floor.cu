#include "bench/gpu/flag_floor.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/memory.h"

namespace {

using namespace keyhole::gpu;

struct Lines {
  alignas(128) uint64_t there;
  alignas(128) uint64_t back;
};

__global__ void ping(Lines* lines, uint64_t* times, int round_trips) {
  for (int i = 1; i <= round_trips; ++i) {
    const uint64_t start = nanoseconds();
    store_relaxed_system(&lines->there, i);
    while (load_acquire_system(&lines->back) < static_cast<uint64_t>(i)) {
    }
    times[i - 1] = nanoseconds() - start;
  }
}

}  // namespace

double flag_round_trip_ns(int round_trips) {
  const PinnedBuffer memory(sizeof(Lines));
  const DeviceBuffer device_times(sizeof(uint64_t) * static_cast<size_t>(round_trips));
  auto* lines = memory.as<Lines>();
  ping<<<1, 1>>>(memory.device<Lines>(), device_times.as<uint64_t>(), round_trips);
  check_launch("ping");
  for (int i = 1; i <= round_trips; ++i) {
    while (std::atomic_ref(lines->there).load(std::memory_order_acquire) <
           static_cast<uint64_t>(i)) {
    }
    std::atomic_ref(lines->back).store(static_cast<uint64_t>(i), std::memory_order_release);
  }
  check(cudaDeviceSynchronize(), "ping");
  std::vector<uint64_t> times(static_cast<size_t>(round_trips));
  check(cudaMemcpy(times.data(), device_times.data(), device_times.bytes(), cudaMemcpyDeviceToHost),
        "ping");
  // The clock ticks coarsely: the mean of the middle half.
  std::sort(times.begin(), times.end());
  double sum = 0;
  for (size_t i = times.size() / 4; i < times.size() * 3 / 4; ++i) {
    sum += static_cast<double>(times[i]);
  }
  return sum / static_cast<double>(times.size() * 3 / 4 - times.size() / 4);
}
