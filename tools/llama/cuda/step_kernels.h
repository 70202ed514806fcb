// One token through a layer: products of a weight matrix with one vector, each in one kernel with the work before and
// after it. A step takes the time of reading the weights once, and of the launches: 4 a layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// The token of a step and its position, in device memory, so that a captured step can be launched again.
struct StepInput {
  uint32_t token = 0;
  uint32_t position = 0;
};

/// Writes hidden `[width]` = row of the table, and turns `[half]` = (cos, sin) of position * frequency. Enqueues,
/// like all functions here.
void begin_step(const StepInput* input, const Split& table, uint32_t width,
                const double* frequencies, uint32_t half, float* hidden, float2* turns,
                cudaStream_t stream);

/// The norm of x: x / sqrt(mean(x^2) + eps) * weight.
struct Norm {
  const float* weight = nullptr;
  float eps = 0.0F;
};

/// A weight matrix `[rows, columns]`; columns a multiple of 8.
struct StepMatrix {
  Split w;
  uint32_t rows = 0;
  uint32_t columns = 0;
};

/// Enqueues qkv `[rows]` = W norm(x), with the first `rotated_heads` heads of dimension 2 * half turned by RoPE.
void step_qkv(const StepMatrix& w, const float* x, const Norm& norm, const float2* turns,
              uint32_t half, uint32_t rotated_heads, float* qkv, cudaStream_t stream);
/// Enqueues y `[rows]` += W x. A thread block of the other products has all of the vector in shared memory, 4 bytes of
/// each column (up to 25,344 of them on GPUs for desktops, more than models have of hidden numbers); this one divides
/// columns that are more.
void step_add(const StepMatrix& w, const float* x, float* y, cudaStream_t stream);
/// Enqueues y `[rows / 2]` = silu(G norm(x)) * (U norm(x)): W is G's rows, then U's.
void step_gate_up(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                  cudaStream_t stream);
/// Enqueues y `[rows]` = W norm(x).
void step_logits(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                 cudaStream_t stream);

}  // namespace keyhole::tools::cuda
