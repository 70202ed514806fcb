// Steps of sessions of a CUDA device that wait to be enqueued together.
#pragma once

#include <vector>

#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/step_group.h"

namespace keyhole::gpu {

class CudaStepGroup final : public StepGroup {
 public:
  /// Has room for up to `most` steps, so that adding them allocates nothing.
  CudaStepGroup(int ordinal, uint32_t most);

  /// Adds a step that may go with others. Returns false if it goes alone and was not added.
  [[nodiscard]] bool add(const CodesStep& step, cudaStream_t stream, bool ahead);
  [[nodiscard]] uint32_t count() const override { return static_cast<uint32_t>(steps_.size()); }
  void launch(std::span<std::exception_ptr> errors) noexcept override;
  [[nodiscard]] CudaStepGroup* on_cuda() override { return this; }

 private:
  struct Place {
    CodesKind kind;
    cudaStream_t stream = nullptr;
    bool ahead = false;  ///< see attend_codes()

    bool operator==(const Place&) const = default;
  };
  void launch(std::span<const uint32_t> numbers);

  int ordinal_;
  std::vector<CodesStep> steps_;
  std::vector<Place> places_;     ///< of each step
  std::vector<uint32_t> kinds_;   ///< number of the first step with the same place
  std::vector<CodesStep> joint_;  ///< the steps of one launch
};

}  // namespace keyhole::gpu
