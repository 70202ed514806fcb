#include "gpu/cuda/common/session_memory.h"

#include <cuda_runtime_api.h>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"

namespace keyhole::gpu {

SessionMemory::SessionMemory(const ResidentPlace& place, const std::string& who)
    : SessionMemory(place.ordinal, place.session) {
  if (session_ != nullptr) return;
  throw Error(Status::invalid_argument,
              who + ": the session's resident tokens lie on no CUDA device");
}

void SessionMemory::claim(size_t bytes, const char* what) const {
  const auto refuse_memory = [&](const std::string& why) {
    throw Error(Status::out_of_device_memory, std::string(what) + ": " + std::to_string(bytes) +
                                                  " bytes of device memory are needed, " + why);
  };
  const size_t limit = session_->memory_limit, claimed = session_->claimed;
  if (limit != 0 && (claimed > limit || bytes > limit - claimed)) {
    refuse_memory("the limit is " + std::to_string(limit) + " bytes, of which " +
                  std::to_string(claimed) + " are taken");
  }
  const DeviceScope device(ordinal_);
  size_t unused = 0, all = 0;
  check(cudaMemGetInfo(&unused, &all), "the device's free memory");
  if (bytes > unused) {
    refuse_memory(std::to_string(unused) + " of the device's " + std::to_string(all) +
                  " bytes are free");
  }
  session_->claimed += bytes;
}

}  // namespace keyhole::gpu
