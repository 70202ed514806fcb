#include "tools/llama/cuda/activation.cuh"
#include "tools/llama/cuda/family_kernels.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/reduce.cuh"

namespace keyhole::tools::cuda {
namespace {

constexpr int kThreads = 256;

/// A block has one token.
__global__ void __launch_bounds__(kThreads) update_kernel(const Update a, float* hidden) {
  const size_t row = size_t{blockIdx.x} * a.width;
  const auto number = [&](uint32_t i) {
    return a.rows[row + i] + (a.bias == nullptr ? 0.0F : a.bias[i]);
  };
  float scale = 1.0F;
  if (a.norm != nullptr) {
    float squares = 0.0F;
    for (uint32_t i = threadIdx.x; i < a.width; i += kThreads) squares += number(i) * number(i);
    scale = 1.0F / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(a.width) + a.eps);
  }
  for (uint32_t i = threadIdx.x; i < a.width; i += kThreads) {
    hidden[row + i] += a.norm == nullptr ? number(i) : number(i) * scale * a.norm[i];
  }
}

__global__ void __launch_bounds__(kThreads) activate_rows_kernel(const GateUp a, float* out) {
  const uint32_t i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= a.inner) return;
  const float* const row = a.gate_up + size_t{blockIdx.x} * 2 * a.inner;
  const float gate = row[i] + (a.bias == nullptr ? 0.0F : a.bias[i]);
  const float up = row[a.inner + i] + (a.bias == nullptr ? 0.0F : a.bias[a.inner + i]);
  out[size_t{blockIdx.x} * a.inner + i] = activated(a.gelu, gate) * up;
}

__global__ void __launch_bounds__(kThreads) soft_cap_kernel(float cap, uint32_t count, float* x) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] = soft_capped(cap, x[i]);
}

__global__ void step_turns_kernel(const StepInput* input, const double* frequencies, uint32_t pairs,
                                  double factor, float2* turns) {
  const uint32_t position = input->position;
  for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    double sine, cosine;
    sincos(position * frequencies[i], &sine, &cosine);
    turns[i] = make_float2(static_cast<float>(factor * cosine), static_cast<float>(factor * sine));
  }
}

}  // namespace

void add_update(const Update& update, float* hidden, cudaStream_t stream) {
  update_kernel<<<update.n, kThreads, 0, stream>>>(update, hidden);
  check_launch("an update");
}

void activate_rows(const GateUp& from, float* out, cudaStream_t stream) {
  const dim3 grid(from.n, (from.inner + kThreads - 1) / kThreads);
  activate_rows_kernel<<<grid, kThreads, 0, stream>>>(from, out);
  check_launch("activation");
}

void soft_cap(float cap, uint32_t count, float* x, cudaStream_t stream) {
  soft_cap_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(cap, count, x);
  check_launch("soft-cap");
}

void step_turns(const StepInput* input, const double* frequencies, uint32_t pairs, double factor,
                float2* turns, cudaStream_t stream) {
  step_turns_kernel<<<1, 128, 0, stream>>>(input, frequencies, pairs, factor, turns);
  check_launch("RoPE of a step");
}

}  // namespace keyhole::tools::cuda
