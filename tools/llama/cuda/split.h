// Numbers as sums of two bf16, with which the decoder's matrix products compute.
//
// Tensor cores multiply bf16 exactly and add in fp32. x = high + low keeps 16 bits of x's mantissa, so W x = W high +
// W low is as good as fp32 arithmetic for text (relative error 2^-17 of each x), at twice the products of plain bf16,
// whose 2^-9 flips tokens. Most checkpoints are bf16 and have no low part. With fp32 or fp16 weights there are three
// products, W high + W low + (low of W) high; the rest is 2^-17 again.
#pragma once

#include <cuda_bf16.h>

namespace keyhole::tools::cuda {

/// Two arrays of the same shape. low may be null and then stands for 0; what is written without it is rounded.
struct Split {
  const __nv_bfloat16* high = nullptr;
  const __nv_bfloat16* low = nullptr;
};
struct SplitOut {
  __nv_bfloat16* high = nullptr;
  __nv_bfloat16* low = nullptr;
};

}  // namespace keyhole::tools::cuda
