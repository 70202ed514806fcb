// Steps over codes of several sessions that are enqueued together (StreamSteps::step(), step_tokens()): those of one
// kind by one launch of each kernel, so that sequences that are too short to fill a device by themselves fill it
// together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

namespace keyhole::gpu {

class CudaStepGroup;  // gpu/cuda/step/cuda_step_group.h

/// Steps that wait to be enqueued, of different sessions of one device. One thread at a time. What else is enqueued for
/// a session after its step comes after launch().
class StepGroup {
 public:
  virtual ~StepGroup() = default;
  /// Steps that wait.
  [[nodiscard]] virtual uint32_t count() const = 0;
  /// Enqueues all of them, each on the stream that it was added for; none waits after that. errors: `[count()]`, in the
  /// order in which the steps were added; gets why a step could not be enqueued (Error: device_error), null: it was.
  virtual void launch(std::span<std::exception_ptr> errors) noexcept = 0;
  /// This group as steps of a CUDA device join it; null: they go alone.
  [[nodiscard]] virtual CudaStepGroup* on_cuda() { return nullptr; }
};

/// Divides steps, kinds[i] being the kind of step i, into launches of up to kMost of one kind, and calls
/// launch(std::span<const uint32_t> of rising numbers of steps) for each, kinds in the order of their first steps.
/// Launches of a kind have as many steps, or one less: 17 go as 8 and 9, as one alone would leave the device idle.
template <uint32_t kMost, class Launch>
void divide_steps(std::span<const uint32_t> kinds, const Launch& launch) {
  std::array<uint32_t, kMost> numbers;
  for (size_t first = 0; first < kinds.size(); ++first) {
    const auto begin = kinds.begin();
    const auto own = begin + static_cast<ptrdiff_t>(first);
    if (std::find(begin, own, *own) != own) continue;
    const auto all = static_cast<size_t>(std::count(own, kinds.end(), *own));
    const size_t launches = (all + kMost - 1) / kMost;
    size_t seen = 0, done = 0;
    uint32_t has = 0;
    for (size_t i = first; i < kinds.size(); ++i) {
      if (kinds[i] != *own) continue;
      numbers[has++] = static_cast<uint32_t>(i);
      if (++seen != (done + 1) * all / launches) continue;
      // Never more than kMost; GCC 14 must be told, to which numbers + 1 looks reachable where kMost is 1
      // (-Warray-bounds).
      launch(std::span<const uint32_t>(numbers.data(), std::min(has, kMost)));
      ++done;
      has = 0;
    }
  }
}

}  // namespace keyhole::gpu
