// The activations of gated MLPs and the soft-cap of logits, one number at a time: for steps and prompts alike.
#pragma once

namespace keyhole::tools::cuda {

__device__ inline float silu(float x) { return x / (1.0F + __expf(-x)); }

/// GELU by tanh, as Gemma has it.
__device__ inline float gelu_tanh(float x) {
  constexpr float kRootOf2OverPi = 0.7978845608F;
  return 0.5F * x * (1.0F + tanhf(kRootOf2OverPi * (x + 0.044715F * x * x * x)));
}

/// cap * tanh(x / cap), to 1e-6 of cap.
__device__ inline float soft_capped(float cap, float x) {
  return cap * (1.0F - 2.0F / (1.0F + __expf(2.0F / cap * x)));
}

__device__ inline float activated(bool gelu, float x) { return gelu ? gelu_tanh(x) : silu(x); }

}  // namespace keyhole::tools::cuda
