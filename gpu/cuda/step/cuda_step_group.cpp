#include "gpu/cuda/step/cuda_step_group.h"

#include <algorithm>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"

namespace keyhole::gpu {

CudaStepGroup::CudaStepGroup(int ordinal, uint32_t most) : ordinal_(ordinal) {
  steps_.reserve(most);
  places_.reserve(most);
  kinds_.reserve(most);
  joint_.reserve(kMostJointSteps);
}

bool CudaStepGroup::add(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const Place place{codes_kind(step), stream, ahead};
  if (place.kind.attend == nullptr || steps_.size() == steps_.capacity()) return false;
  const auto same = std::find(places_.begin(), places_.end(), place);
  kinds_.push_back(static_cast<uint32_t>(same - places_.begin()));
  places_.push_back(place);
  steps_.push_back(step);
  return true;
}

void CudaStepGroup::launch(std::span<const uint32_t> numbers) {
  joint_.clear();
  for (const uint32_t i : numbers) joint_.push_back(steps_[i]);
  const Place& place = places_[numbers[0]];
  check(step_codes(joint_, place.stream, place.ahead), "attending codes of several sessions");
}

void CudaStepGroup::launch(std::span<std::exception_ptr> errors) noexcept {
  std::fill(errors.begin(), errors.end(), nullptr);
  try {
    const DeviceScope device(ordinal_);
    divide_steps<kMostJointSteps>(kinds_, [&](std::span<const uint32_t> numbers) {
      try {
        launch(numbers);
      } catch (...) {
        for (const uint32_t i : numbers) errors[i] = std::current_exception();
      }
    });
  } catch (...) {
    // No device, and nothing has been enqueued.
    std::fill(errors.begin(), errors.end(), std::current_exception());
  }
  steps_.clear();
  places_.clear();
  kinds_.clear();
}

}  // namespace keyhole::gpu
