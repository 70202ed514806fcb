// Does a kernel that waits for the host work here? Not where launches are made one at a time (debuggers, tools
// that check memory, CUDA_LAUNCH_BLOCKING), nor where they are handed over in batches (WDDM): the host would then
// raise its flag only after the kernel had ended.
#include <atomic>
#include <chrono>

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/exchange/signal_probe.h"

namespace keyhole::gpu {
namespace {

constexpr uint64_t kPatienceNs = 20'000'000;  // thousands of round trips over the bus

struct ProbeLines {
  alignas(128) uint64_t raised;
  alignas(128) uint32_t running;
  alignas(128) uint32_t outcome;  // 1: never seen, 2: seen
};

__global__ void wait_for_flag(ProbeLines* lines) {
  store_release_system(&lines->running, 1);
  const uint64_t start = nanoseconds();
  bool seen = false;
  while (!seen && nanoseconds() - start < kPatienceNs) {
    seen = load_acquire_system(&lines->raised) != 0;
  }
  store_release_system(&lines->outcome, seen ? 2 : 1);
}

}  // namespace

bool probe_device_wait(cudaStream_t stream) {
  const PinnedBuffer memory(sizeof(ProbeLines));
  auto* lines = memory.as<ProbeLines>();
  wait_for_flag<<<1, 1, 0, stream>>>(memory.device<ProbeLines>());
  check_launch("trying how to signal");
  // The flag is raised only once the kernel is seen to run: one that was raised before would prove nothing.
  const auto start = std::chrono::steady_clock::now();
  const auto patience = std::chrono::nanoseconds(kPatienceNs);
  while (std::atomic_ref(lines->running).load(std::memory_order_acquire) == 0 &&
         std::chrono::steady_clock::now() - start < patience) {
  }
  std::atomic_ref(lines->raised).store(1, std::memory_order_release);
  check(cudaStreamSynchronize(stream), "trying how to signal");
  return std::atomic_ref(lines->outcome).load(std::memory_order_acquire) == 2;
}

}  // namespace keyhole::gpu
