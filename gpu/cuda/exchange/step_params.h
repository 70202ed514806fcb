// What the kernels of a step are told. Plain structs, passed by value; pointers are the device's.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "cpu/tensor_view.h"
#include "gpu/resident_layout.h"
#include "gpu/ring.h"
#include "gpu/step.h"

namespace keyhole::gpu {

struct AttentionState;  // gpu/cuda/common/state.cuh

/// The wait for the host's state, and the merge with it.
struct MergeParams {
  TensorOut out;
  float* lse = nullptr;                 ///< `[q_heads]`; null: not asked for
  const float* resident_o = nullptr;    ///< `[q_heads, head_dim]`
  const float* resident_lse = nullptr;  ///< `[q_heads]`
  const std::byte* slots = nullptr;     ///< of the layer, in pinned memory
  size_t slot_bytes = 0;
  const DeliveredLine* delivered = nullptr;  ///< of the layer
  WaitSums* waited = nullptr;                ///< per KV head
  FailureLine* failure = nullptr;
  uint64_t timeout_ns = 0;
  uint32_t layer = 0;
  uint32_t group = 0;
  uint32_t head_dim = 0;
  bool wait = true;  ///< false: the host is known to have delivered
};

/// o `[group, head_dim]`, lse `[group]`, and what keeps the next one's rows aligned.
KEYHOLE_HOST_DEVICE constexpr size_t host_state_stride(uint32_t group, uint32_t head_dim) {
  return size_t{group} * head_dim + kMaxDeviceGroup;
}

/// Publishing q, k, v, and the resident attention.
struct StepParams {
  RingShape ring;
  LogitParams logits;
  uint32_t kv_heads = 0;
  uint32_t group = 0;
  uint32_t splits = 0;
  std::byte* kv = nullptr;      ///< of the layer: per KV head K `[slots, head_dim]`, then V
  DType dtype = DType::f16;     ///< of those, and of k and v as they are published
  RingState* states = nullptr;  ///< of the layer, per KV head
  TensorView q, k, v;
  /// Of steps over codes: the tokens that k and v hold, each of which sees those before it, and of the newest `drafts`
  /// tokens, its own among them, those whose bit `sees` has: bit j is the j-th of them. Of steps of sliding layers
  /// likewise, of their one token; drafts 0: it sees all.
  uint32_t tokens = 1;
  uint32_t drafts = 0;
  uint64_t sees[kMaxDeviceGroup] = {};

  bool counts = true;                  ///< the step advances the layer's state, and is published
  PublishedLine* published = nullptr;  ///< of the layer
  uint32_t* numbers = nullptr;         ///< of the layer, per KV head: steps that were published
  std::byte* rows = nullptr;           ///< of the layer, even sequence numbers
  size_t rows_bytes = 0;               ///< to those of odd ones
  size_t q_bytes = 0, kv_bytes = 0;    ///< from q to k, from k to v

  uint32_t* arrivals = nullptr;              ///< per KV head, zero between launches
  float* partial_o = nullptr;                ///< `[kv_heads, splits, group, head_dim]` numerators
  AttentionState* partial_states = nullptr;  ///< `[kv_heads, splits, group]`
  float* resident_o = nullptr;               ///< result `[q_heads, head_dim]`
  float* resident_lse = nullptr;             ///< result `[q_heads]`
  PublishedLine* done =
      nullptr;  ///< per KV head: gets `ticket` when its result is there; null: no such flag
  uint32_t ticket = 0;

  /// The step's rows are published once the host has taken those of the step before (`merge` says how to wait), and the
  /// next kernel, the pass over codes, starts meanwhile: nothing else waits for the host.
  bool waits_for_last = false;

  /// Of a sliding layer: the newest tokens that are attended, but for drafts that are not seen. Such a step is not
  /// published, and `merges` with what lies in the slot, for which nobody waits. 0: another layer, all of whose
  /// resident tokens are.
  uint32_t window = 0;

  bool merges =
      false;  ///< the step is one launch: whichever state comes last, the block that has it merges
  uint32_t* ready = nullptr;  ///< per KV head, zero between launches
  float* host_states =
      nullptr;  ///< the host's states, on the device, host_state_stride() floats per KV head
  MergeParams merge;
};

}  // namespace keyhole::gpu
