// Attention states of all ranks of a spread sequence in device memory: this rank's, all of them when they are gathered,
// and their merge (keyhole/parallel.h). Everything is enqueued on the caller's stream; one step after the other uses
// the same memory.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// Sizes of the largest layer.
struct RankStatesShape {
  uint32_t ranks = 1;
  uint32_t rows = 0;  ///< query heads
  uint32_t dim = 0;   ///< of values
};

class RankStates {
 public:
  virtual ~RankStates() = default;

  /// What own() is when the rank has no step of its own.
  enum class Nothing : uint8_t {
    empty,  ///< (0, -inf): it has no token
    failed  ///< NaN: its step has failed, and so has the merge on all ranks
  };

  /// This rank's state: o `[rows, dim]` fp32, and right behind it lse `[rows]`, of the layer's rows and dim.
  [[nodiscard]] virtual float* own() = 0;
  /// `[ranks]` of the same.
  [[nodiscard]] virtual float* all() = 0;
  /// Enqueues a state in own(). Throws Error(device_error).
  virtual void fill(Nothing what, uint32_t rows, uint32_t dim, Stream stream) = 0;
  /// Enqueues the merge of all() into out `[rows, dim]`, without gaps, and lse `[rows]` or null. Throws
  /// Error(device_error).
  virtual void merge(uint32_t rows, uint32_t dim, void* out, DType dtype, float* lse,
                     Stream stream) = 0;
  /// Whether the stream has done all that was enqueued, or the device has failed. Not during a capture.
  [[nodiscard]] virtual bool is_done(Stream stream) = 0;
};

}  // namespace keyhole::gpu
