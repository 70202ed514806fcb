#include "gpu/mixed_device.h"

#include <utility>

#include "gpu/blocked.h"
#include "gpu/codes.h"
#include "gpu/copy.h"
#include "gpu/kmeans.h"
#include "gpu/listed.h"
#include "gpu/mixed_parts.h"
#include "gpu/neighbours.h"
#include "gpu/pinned_memory.h"
#include "gpu/prompt.h"
#include "gpu/rank_states.h"
#include "gpu/windows.h"

namespace keyhole::gpu {
namespace {

class MixedDevice final : public Device {
 public:
  explicit MixedDevice(std::shared_ptr<const Device> device) : device_(std::move(device)) {}

  const std::string& name() const override { return device_->name(); }
  bool has(DevicePart part) const override { return device_->has(part); }
  std::optional<size_t> free_bytes() const override { return device_->free_bytes(); }

  std::unique_ptr<Resident> make_resident(
      const ResidentShape& shape, const std::shared_ptr<SessionOnDevice>& session) const override {
    return make_mixed_resident(*device_, shape, session);
  }
  std::unique_ptr<Codes> make_codes(Resident& resident, const CodesShape& shape) const override {
    if (!has(DevicePart::codes)) return nullptr;
    return make_mixed_codes(*device_, resident, shape);
  }
  std::unique_ptr<Windows> make_windows(Resident& resident,
                                        const WindowsShape& shape) const override {
    if (!has(DevicePart::windows)) return nullptr;
    return make_mixed_windows(*device_, resident, shape);
  }

  // Of one shape: a session has one for each.
  std::unique_ptr<BlockedAttention> make_blocked(Resident& resident,
                                                 const BlockedShape& shape) const override {
    return device_->make_blocked(resident, shape);
  }
  std::unique_ptr<ListedAttention> make_listed(Resident& resident,
                                               const BlockedShape& shape) const override {
    return device_->make_listed(resident, shape);
  }

  std::unique_ptr<PinnedMemory> make_pin() const override { return device_->make_pin(); }
  std::unique_ptr<HostCopies> make_copies() const override { return device_->make_copies(); }
  std::unique_ptr<PromptAttention> make_prompt(const PromptShape& shape) const override {
    return device_->make_prompt(shape);
  }
  std::unique_ptr<RankStates> make_rank_states(const RankStatesShape& shape) const override {
    return device_->make_rank_states(shape);
  }
  std::unique_ptr<NeighbourSearch> make_neighbours(const NeighbourConfig& config) const override {
    return device_->make_neighbours(config);
  }
  std::unique_ptr<KMeans> make_kmeans(const KMeansConfig& config) const override {
    return device_->make_kmeans(config);
  }

 private:
  std::shared_ptr<const Device> device_;
};

}  // namespace

std::shared_ptr<const Device> for_mixed_layers(std::shared_ptr<const Device> device) {
  return std::make_shared<const MixedDevice>(std::move(device));
}

}  // namespace keyhole::gpu
