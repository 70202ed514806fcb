// How a pass of a turn over codes is launched, by Hopper's instructions (coded_attend.cuh) or those of all devices
// (coded_general.cuh): for each head dimension, and with chosen blocks where there is a choice.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/launch.h"
#include "gpu/cuda/prefill/coded_kernels.h"

namespace keyhole::gpu::coded {

struct PassKernel {
  const void* kernel;  ///< takes CodedParams; a thread block has kCodedQueries query rows
  uint32_t threads;    ///< of a thread block
  size_t bytes;        ///< of its dynamic shared memory
};

inline void launch_kernel(const PassKernel& pass, const CodedParams& a, cudaStream_t stream) {
  check(cudaFuncSetAttribute(pass.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(pass.bytes)),
        "shared memory of a turn over codes");
  CodedParams params = a;
  void* arguments[] = {&params};
  check(launch_ahead(pass.kernel, dim3(a.padded / kCodedQueries, a.rows.kv_heads, a.splits),
                     dim3(pass.threads), pass.bytes, stream, arguments, a.launches_ahead),
        "a turn over codes");
}

/// Pass::of<head dimension, whether blocks are chosen>() gives the kernel.
template <class Pass, int kDim>
void launch_pass_of(const CodedParams& a, cudaStream_t stream) {
  if constexpr (has_coded_choice(kDim)) {
    if (a.chosen != nullptr) return launch_kernel(Pass::template of<kDim, true>(), a, stream);
  }
  launch_kernel(Pass::template of<kDim, false>(), a, stream);
}
template <class Pass>
void launch_pass(const CodedParams& a, cudaStream_t stream) {
  switch (a.rows.code.dim) {
    case 64: return launch_pass_of<Pass, 64>(a, stream);
    case 80: return launch_pass_of<Pass, 80>(a, stream);
    case 96: return launch_pass_of<Pass, 96>(a, stream);
    case 128: return launch_pass_of<Pass, 128>(a, stream);
    default: return launch_pass_of<Pass, 256>(a, stream);
  }
}

}  // namespace keyhole::gpu::coded
