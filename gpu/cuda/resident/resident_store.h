// K and V of a session's sink and window in the memory of a CUDA device, the host's copy of them, and the device memory
// that their steps compute with (gpu/resident_layout.h). It knows no step: who enqueues one asks where things lie.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/exchange/host_exchange.h"
#include "gpu/cuda/exchange/step_params.h"
#include "gpu/mirror.h"
#include "gpu/resident_layout.h"

namespace keyhole::gpu {

/// One thread at a time, but for read_back(). Everything that moves rows of the host goes through a stream of its own,
/// and is ordered after the caller's steps by the numbers that the device publishes, never by waiting for the caller's
/// stream (which may be waiting for this very thread). All throw Error(device_error).
class ResidentStore {
 public:
  /// Takes memory of device `ordinal`, which the caller has claimed (cuda_resident_bytes()). exchange: of the same
  /// session, which outlives this; it says which steps may still read K and V. Throws Error: out_of_device_memory,
  /// out_of_memory.
  ResidentStore(const ResidentShape& shape, int ordinal, HostExchange& exchange);
  ~ResidentStore();
  ResidentStore(const ResidentStore&) = delete;
  ResidentStore& operator=(const ResidentStore&) = delete;

  // As Resident says. Those that change rows wait until the layer's newest awaited step no longer reads them:
  // Error(timeout).
  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n);
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n);
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n);
  void truncate(uint32_t layer, uint32_t sink, uint32_t window);
  [[nodiscard]] uint32_t sink_count(uint32_t layer) const { return mirror_.state(layer).sink; }
  [[nodiscard]] uint32_t window_count(uint32_t layer) const { return mirror_.state(layer).window; }
  void read(uint32_t layer, std::byte* k, std::byte* v) const;

  // As StreamSteps says.
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   cudaStream_t stream);
  /// The host's copy.
  [[nodiscard]] Mirror& mirror() { return mirror_; }
  [[nodiscard]] KvPieces host_copy(uint32_t layer);
  [[nodiscard]] KvPieces device_rows(uint32_t layer);

  // For what enqueues steps.
  /// Tells a kernel where the layer's ring lies.
  void set_ring(uint32_t layer, StepParams& p) const;
  /// The layer's states, `[kv_heads]`.
  [[nodiscard]] RingState* states(uint32_t layer) const {
    return scratch<RingState>(layout_.states(layer));
  }
  /// Device memory beside K and V; zero at first.
  [[nodiscard]] const ScratchLayout& layout() const { return layout_; }
  template <class T>
  [[nodiscard]] T* scratch(size_t offset) const {
    return scratch_.as<T>(offset);
  }
  /// Copies `bytes` of it back, at most PinnedLayout::copied(); waits for the own stream. Any thread.
  void read_back(size_t offset, void* to, size_t bytes) const;

  /// Waits until the layer's newest awaited step no longer reads K and V. Throws Error(timeout).
  void wait_idle(uint32_t layer);
  /// The stream of steps with tensors of the host.
  [[nodiscard]] cudaStream_t own_stream() const { return own_->get(); }
  /// Something was enqueued there that steps on other streams must come after.
  void note_own_work() { own_is_busy_ = true; }
  /// Waits for what the own stream has under way, before another stream may read it.
  void finish_own_work();
  /// From now on callers' streams have steps, and perhaps graphs of them, which are launched without a call to this
  /// class: each change of rows is waited for.
  void open_to_streams() {
    streams_used_ = true;
    finish_own_work();
  }

 private:
  /// Enqueues that rows of the host come to where tokens first, ... lie, and that the layer's state is the mirror's; n
  /// may be 0.
  void append(uint32_t layer, uint32_t first, const std::byte* k, const std::byte* v, uint32_t n);
  [[nodiscard]] size_t layer_bytes() const {
    return 2 * row_bytes_ * (size_t{shape_.sink} + shape_.window_capacity);
  }
  [[nodiscard]] std::byte* rows_of(uint32_t layer) const {
    return kv_.data() + layer * layer_bytes();
  }

  const ResidentShape shape_;
  const int ordinal_;
  const RingShape ring_;
  const ScratchLayout layout_;
  const size_t row_bytes_;  ///< of one token, all heads: K, or V
  HostExchange* exchange_;

  Mirror mirror_;
  std::vector<uint32_t> idle_after_;  ///< [layer] newest step that wait_idle() saw the end of
  DeviceBuffer kv_, scratch_;
  PinnedBuffer staging_;
  std::unique_ptr<OwnStream> own_;
  mutable std::mutex copy_mutex_;
  std::unique_ptr<Event> staged_[2];  ///< this half of the staging memory may be filled again
  uint32_t half_ = 0;
  bool own_is_busy_ = false;
  bool streams_used_ = false;
};

}  // namespace keyhole::gpu
