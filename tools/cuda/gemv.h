// y = W x with a matrix in fp16: what decoding one token does with each weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace keyhole::tools {

/// Enqueues y `[rows]` = W `[rows, columns]` x `[columns]`; fp16, summed in fp32. columns is a multiple of 8, all
/// pointers of 16 bytes. Bound by the memory that W lies in.
cudaError_t enqueue_gemv(const uint16_t* w, const uint16_t* x, uint16_t* y, uint32_t rows,
                         uint32_t columns, cudaStream_t stream);

/// Enqueues: count numbers, uniform in (-bound, bound), the same for the same seed.
cudaError_t enqueue_random(uint16_t* out, uint64_t count, float bound, uint64_t seed,
                           cudaStream_t stream);

}  // namespace keyhole::tools
