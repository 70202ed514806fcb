// Leaving the answer of a step for the host, which audits it: what the step would have written to the caller's out and
// lse it has written to the session's memory in fp32, and a kernel of its own takes it from there to both.
//
// A kernel more in a step, and so in those steps alone that keep their answer:
// of steps that are not captured those that are audited, of a session with audits all that are captured. The kernels
// before it are the same in either case.
#pragma once

#include <cuda_runtime_api.h>

#include "cpu/tensor_view.h"
#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

struct AnswerParams {
  const float* o = nullptr;           ///< `[q_heads, head_dim]`
  const float* lse = nullptr;         ///< `[q_heads]`
  const uint32_t* numbers = nullptr;  ///< of the layer, per KV head: steps that were published
  TensorOut out;
  float* out_lse = nullptr;           ///< `[q_heads]`; null: not asked for
  std::byte* answers = nullptr;       ///< of the layer, even steps; pinned memory
  size_t answer_bytes = 0;            ///< to those of odd ones
  size_t slot_bytes = 0;              ///< from KV head to KV head
  PublishedLine* answered = nullptr;  ///< per KV head
  uint32_t group = 0, head_dim = 0;
};

/// Enqueues it behind what wrote o and lse. Throws Error(device_error).
void launch_answer(AnswerParams params, uint32_t kv_heads, bool ahead, cudaStream_t stream);

}  // namespace keyhole::gpu
