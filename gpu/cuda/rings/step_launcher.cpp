#include <algorithm>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/launch.h"
#include "gpu/cuda/rings/step_kernel.h"

namespace keyhole::gpu {
namespace {

constexpr int kMostStages =
    4;  // kMostPendingCopies of gpu/cuda/common/async_copy.cuh, and the one that is waited for

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "the device's limits");
  return value;
}

}  // namespace

StepLauncher::StepLauncher(const ResidentShape& shape) : kv_heads_(shape.kv_heads) {
  int device = 0;
  check(cudaGetDevice(&device), "the current CUDA device");
  const auto [per_block, per_sm] = shared_memory_of(device);
  const uint32_t group = shape.q_heads / shape.kv_heads;
  switch (shape.dtype) {
    case DType::f16: kernel_ = step_kernel_f16(shape.head_dim, group, per_block); break;
    case DType::bf16: kernel_ = step_kernel_bf16(shape.head_dim, group, per_block); break;
    default: kernel_ = step_kernel_f32(shape.head_dim, group, per_block);
  }
  ahead_ = kernels_have_clusters(device);
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel_.function), "the attention kernel for this GPU");

  // Two blocks on a multiprocessor if each then still has two tiles under way, else one with as many as fit.
  const auto stages_within = [&](size_t bytes) {
    const size_t taken = kernel_.fixed_bytes + attributes.sharedSizeBytes + kReservedOfBlock;
    if (bytes < taken) return 0;
    return static_cast<int>(
        std::min<size_t>((bytes - taken) / kernel_.stage_bytes, size_t{kMostStages}));
  };
  const bool is_staged = shape.dtype != DType::f32;
  stages_ = is_staged ? std::min(stages_within(per_sm / 2), stages_within(per_block)) : 1;
  if (stages_ < 2 && is_staged) stages_ = stages_within(per_block);
  stages_ = std::max(stages_, 1);
  shared_bytes_ = std::max(kernel_.least_bytes, kernel_.fixed_bytes + static_cast<size_t>(stages_) *
                                                                          kernel_.stage_bytes);
  if (shared_bytes_ + attributes.sharedSizeBytes > per_block) {
    throw Error(Status::unsupported,
                "a block of the attention kernel needs " + std::to_string(shared_bytes_) +
                    " bytes of shared memory; this GPU has " + std::to_string(per_block));
  }
  check(cudaFuncSetAttribute(kernel_.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes_)),
        "shared memory of the attention kernel");

  int blocks = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_.function, 128, shared_bytes_),
      "occupancy of the attention kernel");
  if (blocks < 1) {
    throw Error(Status::unsupported, "the attention kernel does not fit on this GPU");
  }
  // All blocks at once, those that publish among them: a second wave would double the time.
  const auto all =
      static_cast<uint32_t>(blocks * attribute(cudaDevAttrMultiProcessorCount, device));
  can_wait_ = kv_heads_ <= all / 2;
  const uint32_t each = std::min(all, kMaxBlocks) / kv_heads_;
  splits_ = std::clamp(each > 1 ? each - 1 : 1U, 1U, split_capacity(kv_heads_));
}

void StepLauncher::launch(StepParams params, cudaStream_t stream) const {
  params.splits = splits_;
  int stages = stages_;
  void* arguments[] = {&params, &stages};
  const dim3 grid(kv_heads_, splits_ + (params.counts ? 1 : 0));
  check(launch_ahead(kernel_.function, grid, dim3(128), shared_bytes_, stream, arguments, ahead_),
        "launching the resident attention");
}

}  // namespace keyhole::gpu
