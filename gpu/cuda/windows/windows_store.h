// K and V of a session's sliding layers in the memory of a CUDA device: a ring for each layer (gpu/windows_layout.h).
// It knows no step: who enqueues one asks where things lie.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/exchange/step_params.h"
#include "gpu/resident.h"
#include "gpu/windows.h"
#include "gpu/windows_layout.h"

namespace keyhole::gpu {

/// Throws Error(invalid_argument), which names sliding layers.
[[noreturn]] void refuse_windows(const std::string& text);
/// Throws Error(invalid_argument) for rows that no kernel takes. what: of a step.
void check_window_rows(const TensorView& rows, const char* what);

/// One thread at a time.
class WindowsStore {
 public:
  /// For the session whose resident tokens lie at `place`. Throws Error: invalid_argument, unsupported,
  /// out_of_device_memory, out_of_memory, device_error.
  WindowsStore(const ResidentPlace& place, const WindowsShape& shape);
  ~WindowsStore();
  WindowsStore(const WindowsStore&) = delete;
  WindowsStore& operator=(const WindowsStore&) = delete;

  // As Windows says.
  void fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k, const std::byte* v);
  void keep(uint32_t layer, uint32_t first, uint32_t n);
  void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const;
  void append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
              const TensorView& v, cudaStream_t stream);
  [[nodiscard]] bool are_finite(const TensorView& rows, DType as, cudaStream_t stream);
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   cudaStream_t stream);
  [[nodiscard]] size_t bytes() const { return layout_.bytes; }

  // For what enqueues steps.
  [[nodiscard]] int ordinal() const { return session_.ordinal(); }
  [[nodiscard]] const WindowsShape& shape() const { return shape_; }
  /// The layers as the attention over their rings sees them.
  [[nodiscard]] const ResidentShape& attended() const { return layout_.resident; }
  /// Throws Error(invalid_argument) for a layer that is not there.
  void check_layer(uint32_t layer) const;
  /// Tells a kernel where the layer's ring lies, and what it computes with.
  void set_ring(uint32_t layer, StepParams& p) const;
  /// Tells a merge what stands in place of the host's state: learned sinks, for which it does not wait.
  void set_end(uint32_t layer, MergeParams& m) const;
  /// The layer's states, `[kv_heads]`.
  [[nodiscard]] RingState* states(uint32_t layer) const {
    return memory_.as<RingState>(layout_.scratch.states(layout_.places[layer]));
  }

 private:
  [[nodiscard]] size_t row_bytes() const { return shape_.head_dim * dtype_size(shape_.dtype); }
  [[nodiscard]] RingShape ring(uint32_t layer) const;
  /// No tokens, and the states that stand in place of the host's.
  void clear();
  /// body(where they lie, place among `[2 * kv_heads, n]` rows, bytes) for the runs of slots of tokens first, ...
  template <class Body>
  void for_runs(uint32_t layer, uint32_t first, uint32_t n, const Body& body) const;

  SessionMemory session_;
  const WindowsShape shape_;
  const WindowsLayout layout_;
  DeviceBuffer memory_;
  std::unique_ptr<OwnStream> own_;
};

}  // namespace keyhole::gpu
