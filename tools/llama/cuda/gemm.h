// The products of many tokens with a weight matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// c = x w^T, or c += x w^T; all row-major and dense.
struct GemmArgs {
  Split x;             ///< `[m, k]`
  Split w;             ///< `[n, k]`; low is null for bf16 weights
  float* c = nullptr;  ///< `[m, n]`
  uint32_t m = 0;
  uint32_t n = 0;  ///< a multiple of 8, as k is
  uint32_t k = 0;
  bool add = false;
};

/// Enqueues x.high w.high + x.low w.high (+ x.high w.low), each product exact, sums in fp32.
void gemm(const GemmArgs& args, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
