// The choice among the lists of a step: which thread blocks of a KV head choose, with how much shared memory, and their
// launch (gpu/cuda/codes/list_choice.cuh).
#include <algorithm>

#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/common/device_figures.h"

namespace keyhole::gpu {
namespace codes {
namespace {

/// How many of its lists a block of the choice keeps in shared memory: all up to 72 KiB of them, so that thread blocks
/// of the pass fit beside it, or what a thread block may have.
uint32_t kept_lists(const CodesStep& step, const ListKernel& kernel, size_t most) {
  constexpr size_t kMostBytes = size_t{72} << 10U;
  const uint32_t tiles = step.lists.blocks * kListTile;
  const uint32_t of_block = (step.lists.list_capacity + tiles - 1) / tiles * kListTile;
  const size_t lists = std::min(kMostBytes, most - kernel.shared_of(step.lists.share)) /
                       kernel.list_of(step.lists.share);
  return std::min(of_block, static_cast<uint32_t>(lists) / kListTile * kListTile);
}

size_t list_bytes(const CodesStep& step, const ListKernel& kernel) {
  return kernel.shared_of(step.lists.share) + step.lists.kept * kernel.list_of(step.lists.share);
}
ListKernel choosing_kernel(const CodesStep& step) {
  return step.lists.by_memory ? list_grid_kernel_of(step.shape.dim, step.group, step.lists.blocks)
                              : list_kernel_of(step.shape.dim, step.group, step.lists.blocks);
}

/// Lets the kernel that chooses have all shared memory that there is.
cudaError_t allow_choice(const ListKernel& kernel, size_t most) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel.choose);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel.choose, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most - attributes.sharedSizeBytes));
}

/// Has the step choose by so many thread blocks of a KV head; 0 of them where there is no kernel for the shape, or too
/// little shared memory for it.
cudaError_t take_blocks(CodesStep& step, uint32_t blocks, size_t most) {
  step.lists.blocks = blocks;
  const ListKernel kernel = choosing_kernel(step);
  if (kernel.choose == nullptr || kernel.shared_of(step.lists.share) > most) {
    step.lists.blocks = 0;
    return cudaSuccess;
  }
  step.lists.kept = kept_lists(step, kernel, most);
  const cudaError_t status = allow_choice(kernel, most);
  if (status != cudaSuccess || step.lists.by_memory || blocks == kListBlocks) return status;
  return cudaFuncSetAttribute(kernel.choose, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

/// Whether the device runs the thread blocks of all KV heads at once: by memory, where they wait for each other, one to
/// a multiprocessor, and else clusters of 16, which wait for their like to end.
bool run_at_once(const CodesStep& step) {
  if (step.lists.by_memory) {
    return size_t{step.kv_heads} * step.lists.blocks <= step.processors;
  }
  const ListKernel kernel = choosing_kernel(step);
  return step.lists.blocks == kListBlocks || count_clusters(kernel.choose, list_bytes(step, kernel),
                                                            step.lists.blocks) >= step.kv_heads;
}

/// Prepares a choice in the way of step.lists.by_memory, by `wanted` thread blocks or by 8; CodesLists::blocks is 0
/// where the device has neither.
cudaError_t prepare_way(CodesStep& step, uint32_t wanted, size_t most) {
  for (const uint32_t blocks : {wanted, kListBlocks}) {
    const cudaError_t status = take_blocks(step, blocks, most);
    if (status != cudaSuccess) return status;
    if (step.lists.blocks != 0 && run_at_once(step)) return cudaSuccess;
  }
  step.lists.blocks = 0;
  return cudaSuccess;
}

cudaError_t launch_at_once(const void* kernel, dim3 grid, size_t bytes, cudaStream_t stream,
                           void** arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kListThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

cudaError_t prepare_choice(CodesStep& step, int device, size_t most) {
  const DeviceSlowness slowness =
      slowness_of(figures_of_device(device), hopper_kernels_run_on(device));
  step.lists.choice_bytes = kChoiceBytesOfH100 / static_cast<float>(slowness.memory);
  // With room for so many lists, 128k tokens, twice the thread blocks are faster.
  constexpr uint32_t kManyLists = 3072;
  const uint32_t usual = step.lists.list_capacity < kManyLists ? kListBlocks : kMostListBlocks;
  const uint32_t wanted = step.lists.blocks == 0 ? usual : step.lists.blocks;
  if (!step.lists.by_memory && kernels_have_clusters(device)) {
    const cudaError_t status = prepare_way(step, wanted, most);
    if (status != cudaSuccess || step.lists.blocks != 0) return status;
  }
  step.lists.by_memory = true;
  return prepare_way(step, wanted, most);
}

}  // namespace codes

cudaError_t choose_lists(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const codes::Kernels kernels = codes::kernels_of(step);
  if (!codes::valid(step, kernels) || step.lists.list_capacity == 0) return cudaErrorInvalidValue;
  codes::CodesParams params;
  codes::lay_out(step, kernels, params);
  void* arguments[] = {&params};
  const codes::ListKernel kernel = codes::choosing_kernel(step);
  if (kernel.choose == nullptr) return cudaErrorInvalidValue;
  if (step.lists.by_memory) {
    return codes::launch_at_once(kernel.choose, dim3(step.lists.blocks * step.kv_heads),
                                 codes::list_bytes(step, kernel), stream, arguments);
  }
  return codes::launch_clusters(kernel.choose, dim3(step.lists.blocks * step.kv_heads),
                                codes::list_bytes(step, kernel), stream, arguments, ahead,
                                step.lists.blocks);
}

}  // namespace keyhole::gpu
