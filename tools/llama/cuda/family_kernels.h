// Kernels between the products that families of models need beyond a plain Llama: rows of n tokens in fp32, one row
// in a step. All enqueue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/step_kernels.h"

namespace keyhole::tools::cuda {

/// The product with W_o or W_down, about to be added to the hidden states.
struct Update {
  const float* rows = nullptr;  ///< `[n, width]`
  const float* bias = nullptr;  ///< `[width]`; null: none
  const float* norm = nullptr;  ///< `[width]`: weights of a norm behind the bias; null: none
  float eps = 0.0F;             ///< of the norm
  uint32_t n = 0, width = 0;    ///< width a multiple of 4
};
/// Enqueues hidden `[n, width]` += norm(rows + bias).
void add_update(const Update& update, float* hidden, cudaStream_t stream);

/// Enqueues activate_tokens() with a result in fp32, `[n, inner]`.
void activate_rows(const GateUp& from, float* out, cudaStream_t stream);

/// Enqueues x `[count]` = cap * tanh(x / cap).
void soft_cap(float cap, uint32_t count, float* x, cudaStream_t stream);

/// Enqueues turns `[pairs]` = (cos, sin) times `factor` for the step's position, which lies in device memory.
void step_turns(const StepInput* input, const double* frequencies, uint32_t pairs, double factor,
                float2* turns, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
