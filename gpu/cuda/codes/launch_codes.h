// What the launches of both passes over codes share (codes_kernels.cu, wide_codes.cu).
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/kernel_generation.h"

namespace keyhole::gpu::codes {

/// Thread blocks of the clusters that choose a step's rows and merge its states: kFinishBlocks of
/// gpu/cuda/codes/choose.cuh.
inline constexpr uint32_t kClusterBlocks = 8;
inline constexpr int kReservedShared = kReservedOfBlock;  ///< bytes of every thread block, by CUDA

/// The kernels of one shape and up to 16 query heads of a KV head; null kernels: there are none.
[[nodiscard]] Kernels kernels_of(const CodeShape& shape, uint32_t group);
/// Those of a step, with `narrow`.
[[nodiscard]] Kernels kernels_of(const CodesStep& step);
[[nodiscard]] SettleKernel settle_kernel_of(const CodeShape& shape);

/// Lays the parts of the work space out one after the other, from step.work on; returns their bytes.
size_t lay_out(const CodesStep& step, const Kernels& kernels, CodesParams& params);

/// Shared memory of the pass over codes with the fewest stages, with what it declares.
[[nodiscard]] size_t least_attend_bytes(const Kernels& kernels);
/// prepare_codes() for what follows the pass alone: chooses CodesStep::cluster, of `step.group` <= 16 heads. needs:
/// gets the bytes of shared memory of the largest thread block.
[[nodiscard]] cudaError_t prepare_finish(CodesStep& step, int device, size_t& needs);

/// Whether the parts of a step can be launched together.
[[nodiscard]] bool valid(const CodesStep& step, const Kernels& kernels);
/// Chooses which thread blocks choose among a step's lists (CodesLists::blocks, by_memory) and how many lists these
/// keep, and lets them have their shared memory. most: what a thread block may have. Behind prepare_finish().
[[nodiscard]] cudaError_t prepare_choice(CodesStep& step, int device, size_t most);

/// The clusters of finish_codes(): one beside those of the KV heads publishes the step.
[[nodiscard]] uint32_t clusters(const CodesStep& step);
/// Shared memory of the kernel that follows the pass, of one step or of several, beside what it declares.
[[nodiscard]] size_t shared_bytes(const CodesStep& step, const Kernels& kernels);
/// Launches a kernel of clusters of so many thread blocks of kFinishThreads threads.
[[nodiscard]] cudaError_t launch_clusters(const void* kernel, dim3 grid, size_t bytes,
                                          cudaStream_t stream, void** arguments, bool ahead,
                                          uint32_t blocks = kClusterBlocks);
/// How many clusters of so many thread blocks, each with so many bytes of dynamic shared memory, the current device
/// runs at once; 0 where it does not say.
[[nodiscard]] uint32_t count_clusters(const void* kernel, size_t bytes,
                                      uint32_t blocks = kClusterBlocks);

// Steps with CodesStep::wide: what the functions of codes_kernels.h do for them.
[[nodiscard]] uint32_t wide_fill(const CodeShape& shape, uint32_t kv_heads, uint32_t rows,
                                 uint32_t multiprocessors, size_t shared_of_multiprocessor);
[[nodiscard]] size_t wide_work_bytes(const CodesStep& step);
[[nodiscard]] cudaError_t prepare_wide(CodesStep& step, int device, size_t* needs);
[[nodiscard]] cudaError_t attend_wide(const CodesStep& step, cudaStream_t stream, bool ahead);
[[nodiscard]] cudaError_t finish_wide(const CodesStep& step, cudaStream_t stream, bool ahead);

}  // namespace keyhole::gpu::codes
