// The product y = W x with a matrix in bf16, which decoding a token computes with each weight matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace keyhole::tools {

/// Enqueues y `[rows]` = W `[rows, columns]` x `[columns]`; W in bf16, x and y in fp16, sums in fp32. columns is a
/// multiple of 8, at most 50,000; all pointers are multiples of 16 bytes. Its speed is bound by the memory that W
/// lies in. W is read before the kernel in front on the stream has ended (tools/cuda/early_launch.cuh), so a kernel
/// that writes W must have ended before that one began.
cudaError_t enqueue_gemv(const uint16_t* w, const uint16_t* x, uint16_t* y, uint32_t rows,
                         uint32_t columns, cudaStream_t stream);

enum class NumberType { f16, bf16 };

/// Enqueues the writing of count numbers, uniform in (-bound, bound), the same for the same seed.
cudaError_t enqueue_random(uint16_t* out, NumberType type, uint64_t count, float bound,
                           uint64_t seed, cudaStream_t stream);

}  // namespace keyhole::tools
