// What a device is without having anything, and what can be said of devices without one.
#include "gpu/device.h"

#include "gpu/blocked.h"
#include "gpu/codes.h"
#include "gpu/copy.h"
#include "gpu/kernel_limits.h"
#include "gpu/kmeans.h"
#include "gpu/listed.h"
#include "gpu/neighbours.h"
#include "gpu/pinned_memory.h"
#include "gpu/prompt.h"
#include "gpu/rank_states.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

std::unique_ptr<Codes> Device::make_codes(Resident&, const CodesShape&) const { return nullptr; }
std::unique_ptr<Windows> Device::make_windows(Resident&, const WindowsShape&) const {
  return nullptr;
}
std::unique_ptr<BlockedAttention> Device::make_blocked(Resident&, const BlockedShape&) const {
  return nullptr;
}
std::unique_ptr<ListedAttention> Device::make_listed(Resident&, const BlockedShape&) const {
  return nullptr;
}
std::unique_ptr<PinnedMemory> Device::make_pin() const { return nullptr; }
std::unique_ptr<HostCopies> Device::make_copies() const {
  throw Error(Status::unsupported, "copies between host and device memory, on " + name());
}
std::unique_ptr<PromptAttention> Device::make_prompt(const PromptShape&) const { return nullptr; }
std::unique_ptr<RankStates> Device::make_rank_states(const RankStatesShape&) const {
  return nullptr;
}
std::unique_ptr<NeighbourSearch> Device::make_neighbours(const NeighbourConfig&) const {
  return nullptr;
}
std::unique_ptr<KMeans> Device::make_kmeans(const KMeansConfig&) const { return nullptr; }

KernelLimits limits_of_capability(int major, int minor) {
  constexpr size_t kKiB = 1024;
  if (major > 12) return {};
  if (major == 12) return {true, 99 * kKiB};
  if (major >= 9) return {true, 227 * kKiB};
  return {false, (minor == 6 || minor == 9 ? 99 : 163) * kKiB};
}

std::string unsupported_reason(const DeviceInfo& device) {
  constexpr int kLeastMajor = 8;
  if (device.compute_major >= kLeastMajor) return {};
  return device.name + " has compute capability " + std::to_string(device.compute_major) + "." +
         std::to_string(device.compute_minor) + ", needed: 8.0 or newer";
}

std::string unsupported_shape(uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim) {
  if (q_heads / kv_heads > kMaxDeviceGroup) {
    return "there are no GPU kernels for " + std::to_string(q_heads / kv_heads) +
           " query heads per KV head, allowed: 1.." + std::to_string(kMaxDeviceGroup);
  }
  if (!is_device_head_dim(head_dim)) {
    return "there are no GPU kernels for head_dim " + std::to_string(head_dim) +
           ", allowed: " + kDeviceHeadDims;
  }
  return {};
}

}  // namespace keyhole::gpu
