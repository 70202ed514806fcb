// How a session's pinned memory and scratch are laid out, in bytes. Arithmetic only: planning needs no device.
//
// Pinned memory, one block per layer:
//   lines     one 128-byte line per KV head for each direction, so that no two flags share a line
//   rows      q, k, v of two steps (a step's are valid until the layer's next one is awaited), of most_step_tokens()
//             each
//   slots     the host's states, per KV head o `[group, head_dim]`, lse `[group]`
//   answers   with keeps_answers, what two steps wrote, likewise, and a line per KV head that says of which step
// and behind the layers what the session has once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/exchange.h"
#include "gpu/resident.h"

namespace keyhole::gpu {

/// Most splits of one KV head's tokens, and most blocks of all heads together (2 on each of 256
/// multiprocessors): as many as there is memory for partial states of.
inline constexpr uint32_t kMaxSplits = 128;
inline constexpr uint32_t kMaxBlocks = 512;

[[nodiscard]] constexpr uint32_t split_capacity(uint32_t kv_heads) {
  const uint32_t splits = kMaxBlocks / (kv_heads == 0 ? 1 : kv_heads);
  return splits < 1 ? 1 : (splits > kMaxSplits ? kMaxSplits : splits);
}

class PinnedLayout {
 public:
  explicit PinnedLayout(const ResidentShape& shape);

  /// Offsets from the beginning.
  [[nodiscard]] size_t published(uint32_t layer, uint32_t kv_head) const {
    return layer * layer_ + kv_head * kLine;
  }
  [[nodiscard]] size_t delivered(uint32_t layer, uint32_t kv_head) const {
    return layer * layer_ + delivered_ + kv_head * kLine;
  }
  /// q `[tokens, q_heads, head_dim]` fp32, k and v `[tokens, kv_heads, head_dim]` q_place() and kv_place() further; of
  /// the step's parity.
  [[nodiscard]] size_t rows(uint32_t layer, uint32_t sequence) const {
    return layer * layer_ + rows_ + (sequence & 1U) * rows_bytes_;
  }
  [[nodiscard]] size_t slot(uint32_t layer, uint32_t kv_head) const {
    return layer * layer_ + slots_ + kv_head * slot_bytes_;
  }
  /// Answers of steps of the sequence's parity, as slots; the line of the newest step that has left one
  /// (PublishedLine).
  [[nodiscard]] size_t answer(uint32_t layer, uint32_t kv_head, uint32_t sequence) const {
    return layer * layer_ + answers_ + (sequence & 1U) * answer_bytes_ + kv_head * slot_bytes_;
  }
  [[nodiscard]] size_t answered(uint32_t layer, uint32_t kv_head) const {
    return layer * layer_ + answered_ + kv_head * kLine;
  }
  /// From the answers of even steps to those of odd ones.
  [[nodiscard]] size_t answer_bytes() const { return answer_bytes_; }
  [[nodiscard]] size_t layer_bytes() const { return layer_; }
  [[nodiscard]] size_t rows_bytes() const { return rows_bytes_; }
  [[nodiscard]] size_t q_bytes() const { return q_bytes_; }
  [[nodiscard]] size_t kv_bytes() const { return kv_bytes_; }  ///< of k, or of v, of one token
  [[nodiscard]] size_t q_place() const { return step_tokens_ * q_bytes_; }
  [[nodiscard]] size_t kv_place() const { return step_tokens_ * kv_bytes_; }
  [[nodiscard]] size_t slot_bytes() const { return slot_bytes_; }

  /// Once per session.
  [[nodiscard]] size_t failure() const { return failure_; }
  /// Of steps with tensors of the host: q, and the result o `[q_heads, head_dim]`, lse `[q_heads]`.
  [[nodiscard]] size_t host_done(uint32_t kv_head) const { return host_done_ + kv_head * kLine; }
  [[nodiscard]] size_t host_q() const { return host_q_; }
  [[nodiscard]] size_t host_o() const { return host_o_; }
  [[nodiscard]] size_t host_lse() const { return host_lse_; }

  /// What is copied back from the device now and then: RingState or WaitSums `[kv_heads]`.
  [[nodiscard]] size_t copied() const { return copied_; }

  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t delivered_, rows_, slots_, answers_, answer_bytes_, answered_, layer_;
  size_t step_tokens_, rows_bytes_, q_bytes_, kv_bytes_, slot_bytes_;
  size_t failure_, host_done_, host_q_, host_o_, host_lse_, copied_, bytes_;
};

/// Launches of one queue run one after the other, those of different queues side by side: each queue has counters and
/// partial states of its own.
enum class StepQueue : uint32_t { stream = 0, host = 1 };  ///< callers' streams; host tensors
inline constexpr size_t kStepQueues = 2;

/// Device memory beside K and V.
class ScratchLayout {
 public:
  explicit ScratchLayout(const ResidentShape& shape);

  /// RingState `[kv_heads]` of a layer: one each, so that no head waits for another to advance it.
  [[nodiscard]] size_t states(uint32_t layer) const { return layer * states_bytes_; }
  /// Arrivals of blocks, per (queue, KV head).
  [[nodiscard]] size_t arrivals(StepQueue queue) const {
    return arrivals_ + static_cast<size_t>(queue) * arrivals_bytes_;
  }
  /// Of a layer, per KV head: steps that were published. The publisher's own count.
  [[nodiscard]] size_t numbers(uint32_t layer) const { return numbers_ + layer * numbers_bytes_; }
  /// Per KV head: which states of the step under way are there (kResidentReady, kHostReady).
  [[nodiscard]] size_t ready() const { return ready_; }
  /// The host's states of the step under way, as they lie in the slots, without gaps.
  [[nodiscard]] size_t host_states() const { return host_states_; }
  /// WaitSums per KV head.
  [[nodiscard]] size_t waited() const { return waited_; }
  /// Resident state, o `[q_heads, head_dim]`, lse `[q_heads]`.
  [[nodiscard]] size_t resident_o(uint32_t layer) const { return o_ + layer * o_bytes_; }
  [[nodiscard]] size_t resident_lse(uint32_t layer) const { return lse_ + layer * lse_bytes_; }
  /// q of a step with tensors of the host, `[q_heads, head_dim]` fp32.
  [[nodiscard]] size_t host_q() const { return host_q_; }
  /// With keeps_answers: the answer of the step under way on the stream, `[q_heads, head_dim]`, `[q_heads]`.
  [[nodiscard]] size_t answer_o() const { return answer_o_; }
  [[nodiscard]] size_t answer_lse() const { return answer_lse_; }
  /// Partial states of the splits, per queue: numerators `[kv_heads, splits, group, head_dim]`, then AttentionState
  /// `[kv_heads, splits, group]`.
  [[nodiscard]] size_t partial_o(StepQueue queue) const {
    return partial_ + static_cast<size_t>(queue) * (partial_o_bytes_ + partial_states_bytes_);
  }
  [[nodiscard]] size_t partial_states(StepQueue queue) const {
    return partial_o(queue) + partial_o_bytes_;
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t states_bytes_, arrivals_, arrivals_bytes_, numbers_, numbers_bytes_, ready_, host_states_,
      waited_, o_, o_bytes_, lse_, lse_bytes_;
  size_t host_q_, answer_o_, answer_lse_, partial_, partial_o_bytes_, partial_states_bytes_, bytes_;
};

/// Pinned memory that rows pass through on their way to the device: two halves, filled in turn.
inline constexpr size_t kStagingBytes = size_t{4} << 20U;
/// Bytes of it for this shape: no more than twice what all resident tokens of a layer take.
[[nodiscard]] size_t staging_bytes(const ResidentShape& shape);

}  // namespace keyhole::gpu
