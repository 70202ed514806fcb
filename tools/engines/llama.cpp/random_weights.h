// Random weights in the types that files of llama.cpp have them in.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <span>

namespace keyhole::llama_cpp {

/// Fills the data of a tensor with numbers whose mean is 0 and whose standard deviation is about `deviation`, the same
/// ones for the same seed. `type`: F16, Q4_K, or Q6_K; F32 gets `deviation` itself in every place, as norms and biases
/// want.
void fill_random(std::span<uint8_t> data, ggml_type type, float deviation, uint64_t seed);

}  // namespace keyhole::llama_cpp
