// K and V of the sliding layers of one sequence: a ring of each. Of a layer with a window of W tokens it keeps W and
// some behind them (Window::slots()), and a step attends to exactly its newest W.
//
// A layer's tokens lie in host memory, or on a device with streams (gpu::Windows): where its last call had its tensors.
// They move when that changes, as a prompt comes to host memory and is decoded on the device. Counts are known here
// either way.
//
// In host memory a ring is to a step the resident tokens of the layer (gpu::Resident) without a sink, so that searches,
// audits and learned sinks need not know of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/memory.h"
#include "cpu/tensor_view.h"
#include "gpu/device.h"
#include "runtime/engine/engine.h"
#include "runtime/kv/stream_windows.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

class SlidingRings final : public gpu::Resident, public StreamWindows {
 public:
  /// Address space for the rings of the model's sliding layers, for sequences of at most max_tokens; memory comes as
  /// tokens do. The engine, and the resident tokens of other layers, whose device it shares, outlive it.
  SlidingRings(const Engine& engine, uint32_t max_tokens, gpu::Resident& others);

  /// Tokens that have come to a layer, of which it attends to window_count().
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return at(layer).tokens; }
  /// Forgets all but the first `tokens`. Precondition: can_truncate().
  void truncate_to(uint32_t layer, uint32_t tokens);
  /// Whether all of the window before token `tokens` is still here, or is empty.
  [[nodiscard]] bool can_truncate(uint32_t layer, uint32_t tokens) const;
  /// The fewest tokens above 0 that it can be cut to.
  [[nodiscard]] uint32_t least_truncation(uint32_t layer) const;
  /// The first of n new tokens that will still be there when all have come: those before it need not be given.
  [[nodiscard]] uint32_t first_kept(uint32_t layer, uint32_t n) const;
  /// Tokens of a layer that are kept; where they are fewer than can come, steps of drafts may miss some.
  [[nodiscard]] uint32_t slots(uint32_t layer) const { return at(layer).slots; }
  /// So many of the tokens that follow are passed over: they will have left when those behind them have come.
  void skip(uint32_t layer, uint32_t n);

  /// The token of the next step stands `ahead` tokens behind the newest one here, itself counted: the window of that
  /// step reaches back less far, as tokens that are not here yet are part of it.
  void set_ahead(uint32_t ahead) { ahead_ = ahead; }
  /// K and V of a token that is still here, `[kv_heads, head_dim]`.
  void read_token(uint32_t layer, uint32_t token, std::byte* k, std::byte* v) const {
    read_tokens(at(layer), token, 1, k, v);
  }

  // Of a device, in sliding_rings_device.cpp.
  [[nodiscard]] bool lies_on_device(uint32_t layer) const { return at(layer).on_device; }
  /// Back to host memory: no step of the layer is under way, and none has failed. Throws Error(device_error); then it
  /// has not moved.
  void move_to_host(uint32_t layer);
  [[nodiscard]] bool can_lie_on_device() const {
    return engine_->device_has(gpu::DevicePart::windows);
  }
  /// Appends the tokens of k and v `[n, kv_heads, head_dim]` in device memory, all finite; waits for the stream. No
  /// step of the layer is under way. Throws as move_to_device().
  void append_on_device(uint32_t layer, const TensorView& k, const TensorView& v,
                        gpu::Stream stream);
  /// Device memory: what was taken; what it will be once steps have been there.
  [[nodiscard]] uint64_t device_bytes() const {
    return windows_ == nullptr ? 0 : windows_->bytes();
  }
  [[nodiscard]] uint64_t device_bytes_to_come() const;
  [[nodiscard]] gpu::Windows& on_device(uint32_t layer) override;
  [[nodiscard]] uint32_t number_on_device(uint32_t layer) const override { return places_[layer]; }
  void move_to_device(uint32_t layer) override;
  void note_appended(uint32_t layer, uint32_t n) override;
  void note_dropped(uint32_t layer, uint32_t n) override { at(layer).tokens -= n; }
  [[nodiscard]] Status failure(std::string& text) override;

  /// The oldest token that is still here; tokens(), where there is none.
  [[nodiscard]] uint32_t oldest(uint32_t layer) const { return at(layer).oldest; }
  /// Whether it is still here.
  [[nodiscard]] bool holds(uint32_t layer, uint32_t token) const {
    return token >= at(layer).oldest && token < at(layer).tokens;
  }

  /// Memory that tokens have touched, and that n more of a layer will.
  [[nodiscard]] uint64_t bytes() const;
  [[nodiscard]] uint64_t more_bytes(uint32_t layer, uint32_t n) const;

  /// Of all sliding layers. from: with the same parameters; it is empty before.
  void copy_from(const SlidingRings& from);
  /// Per sliding layer the number of tokens that came and that are kept, and these `[kept, kv_heads, head_dim]`, K and
  /// V. Throws as read_all().
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io); then it must not be used any more. It is empty before.
  void load(ChecksumReader& in);

  // Resident, of sliding layers.
  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) override;
  void truncate(uint32_t layer, uint32_t sink, uint32_t window) override;
  [[nodiscard]] uint32_t sink_count(uint32_t /*layer*/) const override { return 0; }
  [[nodiscard]] uint32_t window_count(uint32_t layer) const override;
  using Resident::attend_begin;
  void attend_begin(uint32_t layer, const float* q, gpu::Codes* codes) override;
  [[nodiscard]] uint32_t host_tasks() const override { return at(step_layer_).shape.kv_heads; }
  void run_host_task(uint32_t task) override;
  [[nodiscard]] StateView host_state(uint32_t kv_head) override;
  void attend_end(StateView out) override;
  void read(uint32_t layer, std::byte* k, std::byte* v) const override;

 private:
  struct Ring {
    cpu::ReservedBuffer
        memory;  ///< K and V `[2, kv_heads, slots, head_dim]`; token t in slot t % slots
    uint32_t window, slots;
    LayerShape shape;
    size_t row_bytes;
    uint32_t tokens = 0;     ///< that came
    uint32_t oldest = 0;     ///< that is still here
    uint32_t touched = 0;    ///< slots
    bool on_device = false;  ///< its tokens; `memory` is of no use then

    [[nodiscard]] size_t token_bytes() const { return shape.kv_heads * row_bytes; }
  };
  [[nodiscard]] const Ring& at(uint32_t layer) const { return rings_[places_[layer]]; }
  [[nodiscard]] Ring& at(uint32_t layer) { return rings_[places_[layer]]; }
  /// Slot of a head's K (which = 0) or V (which = 1).
  [[nodiscard]] std::byte* slot(const Ring& ring, uint32_t kv_head, uint32_t which,
                                uint32_t slot) const;
  /// Tokens [first, first + n), which are here, oldest first.
  void read_tokens(const Ring& ring, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const;
  void append(Ring& ring, const std::byte* k, const std::byte* v, uint32_t n);
  /// Tokens that are here, from the oldest on.
  struct Kept {
    uint32_t tokens = 0;          ///< that came, with those that have left
    std::vector<std::byte> k, v;  ///< `[n, kv_heads, head_dim]`
  };
  /// All of them; of those on the device, after a step that was given something else, those before the first that is
  /// not finite. Throws Error(device_error), or Error(not_finite) where the ring does not reach back to their window.
  [[nodiscard]] Kept read_all(const Ring& ring) const;
  [[nodiscard]] uint32_t place_of(const Ring& ring) const {
    return static_cast<uint32_t>(&ring - rings_.data());
  }
  [[nodiscard]] gpu::WindowsShape windows_shape() const;

  const Engine* engine_;
  gpu::Resident* others_;
  uint32_t max_tokens_;
  std::vector<uint32_t> places_;  ///< layer -> ring
  std::vector<Ring> rings_;
  std::unique_ptr<gpu::Windows> windows_;  ///< null: no step has been on the device
  uint32_t ahead_ = 0;                     ///< see set_ahead()
  uint32_t step_layer_ = 0;
  uint32_t step_ahead_ = 0;
  const float* step_q_ = nullptr;
  std::vector<float> o_, lse_;  ///< `[q_heads, head_dim]`, `[q_heads]` of the step under way
  std::vector<float> piece_o_, piece_lse_;  ///< likewise, of the ring's second piece
};

}  // namespace keyhole::runtime
