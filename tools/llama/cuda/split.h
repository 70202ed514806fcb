// Numbers as sums of two bf16: what the decoder's matrix products work on.
//
// Tensor cores multiply bf16 exactly and add in fp32. x = high + low keeps 16 bits of x's mantissa, so that
// W x = W high + W low is as good as fp32 arithmetic for text (relative error 2^-17 of each x), at twice the
// products of plain bf16, whose 2^-9 flips tokens. Most checkpoints are bf16: their low part is absent. With
// fp32 or fp16 weights, W high + W low + (low of W) high: three products; what is left out is 2^-17 again.
#pragma once

#include <cuda_bf16.h>

namespace keyhole::tools::cuda {

/// Two arrays of the same shape; low may be null: 0.
struct Split {
  const __nv_bfloat16* high = nullptr;
  const __nv_bfloat16* low = nullptr;
};
struct SplitOut {
  __nv_bfloat16* high = nullptr;
  __nv_bfloat16* low = nullptr;
};

}  // namespace keyhole::tools::cuda
