// What the device interface answers in a build without CUDA.
#include "gpu/blocked.h"
#include "gpu/codes.h"
#include "gpu/copy.h"
#include "gpu/device.h"
#include "gpu/host_pin.h"
#include "gpu/kmeans.h"
#include "gpu/listed.h"
#include "gpu/neighbours.h"
#include "gpu/prompt.h"
#include "gpu/rank_states.h"
#include "gpu/states.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

std::vector<DeviceInfo> cuda_devices() { return {}; }
size_t cuda_free_bytes(int) { return 0; }

std::string cuda_status() { return "built without CUDA"; }

std::unique_ptr<Resident> make_cuda_resident(const ResidentShape&, const CudaConfig&) {
  throw Error(Status::unsupported, "a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<HostCopies> make_host_copies() {
  throw Error(Status::unsupported, "copies from a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<Codes> make_cuda_codes(Resident&, const CodesShape&) {
  throw Error(Status::unsupported, "codes on a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<BlockedAttention> make_cuda_blocked(Resident&, const BlockedShape&) {
  throw Error(Status::unsupported,
              "blocked attention on a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<ListedAttention> make_cuda_listed(Resident&, const BlockedShape&) {
  throw Error(Status::unsupported,
              "attention of listed blocks on a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<PromptAttention> make_cuda_prompt(int, const PromptShape&) {
  throw Error(Status::unsupported,
              "attention of a prompt on a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<Windows> make_cuda_windows(Resident&, const WindowsShape&) {
  throw Error(Status::unsupported, "sliding layers on a CUDA device: this build has no CUDA in it");
}

HostPin::HostPin(int) : ordinal_(0) {
  throw Error(Status::unsupported, "host memory for a CUDA device: this build has no CUDA in it");
}
HostPin::~HostPin() = default;
void HostPin::add(const std::byte*, size_t) {}
void HostPin::drop(const std::byte*, const std::byte*) noexcept {}

std::unique_ptr<NeighbourSearch> make_cuda_neighbours(const NeighbourConfig&) {
  throw Error(Status::unsupported, "neighbour search: this build has no CUDA in it");
}

std::unique_ptr<KMeans> make_cuda_kmeans(const KMeansConfig&) {
  throw Error(Status::unsupported, "k-means on a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<RankStates> make_cuda_rank_states(int, const RankStatesShape&) {
  throw Error(Status::unsupported, "states in device memory: this build has no CUDA in it");
}

void merge_states(const StateMerge&, Stream) {
  throw Error(Status::unsupported, "merging states in device memory: this build has no CUDA in it");
}

}  // namespace keyhole::gpu
