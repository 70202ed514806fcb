// The CUDA device: which class makes each of its parts.
#include <string>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/host_copies.h"
#include "gpu/cuda/common/host_pin.h"
#include "gpu/cuda/common/rank_states.h"
#include "gpu/cuda/common/supported_device.h"
#include "gpu/cuda/indexing/workspaces.h"
#include "gpu/cuda/prefill/new_tokens.h"
#include "gpu/cuda/prefill/prompt_lists.h"
#include "gpu/cuda/step/cuda_stepper.h"
#include "gpu/cuda/step/window_steps.h"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaConfig& config) : config_(config) {
    require_device(config.ordinal, "a CUDA device");
    name_ = cuda_devices()[static_cast<size_t>(config.ordinal)].name;
  }

  const std::string& name() const override { return name_; }
  bool has(DevicePart) const override { return true; }
  std::optional<size_t> free_bytes() const override { return cuda_free_bytes(config_.ordinal); }

  std::unique_ptr<Resident> make_resident(
      const ResidentShape& shape, const std::shared_ptr<SessionOnDevice>& session) const override {
    return std::make_unique<CudaStepper>(shape, config_, session);
  }
  std::unique_ptr<Codes> make_codes(Resident& resident, const CodesShape& shape) const override {
    return make_cuda_codes(resident.place(), shape);
  }
  std::unique_ptr<Windows> make_windows(Resident& resident,
                                        const WindowsShape& shape) const override {
    return make_cuda_windows(resident.place(), shape);
  }
  std::unique_ptr<BlockedAttention> make_blocked(Resident& resident,
                                                 const BlockedShape& shape) const override {
    return make_cuda_blocked(resident.place(), shape);
  }
  std::unique_ptr<ListedAttention> make_listed(Resident& resident,
                                               const BlockedShape& shape) const override {
    return make_cuda_listed(resident.place(), shape);
  }

  std::unique_ptr<PinnedMemory> make_pin() const override {
    return std::make_unique<HostPin>(config_.ordinal);
  }
  std::unique_ptr<HostCopies> make_copies() const override {
    return make_host_copies(config_.ordinal);
  }
  std::unique_ptr<PromptAttention> make_prompt(const PromptShape& shape) const override {
    return make_cuda_prompt(config_.ordinal, shape);
  }
  std::unique_ptr<RankStates> make_rank_states(const RankStatesShape& shape) const override {
    return make_cuda_rank_states(config_.ordinal, shape);
  }
  std::unique_ptr<NeighbourSearch> make_neighbours(const NeighbourConfig& config) const override {
    return make_cuda_neighbours(config_.ordinal, config);
  }
  std::unique_ptr<KMeans> make_kmeans(const KMeansConfig& config) const override {
    return make_cuda_kmeans(config_.ordinal, config);
  }

 private:
  CudaConfig config_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(const CudaConfig& config) {
  return std::make_unique<CudaDevice>(config);
}

}  // namespace keyhole::gpu
