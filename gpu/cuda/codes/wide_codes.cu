// Steps of many query rows (gpu/cuda/codes/wide.cuh): their parts, and the launches of their kernels.
#include <algorithm>

#include "gpu/cuda/codes/choose.cuh"
#include "gpu/cuda/codes/choose_single.cuh"
#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/codes/wide_params.h"
#include "gpu/cuda/common/launch.h"
#include "gpu/step.h"

namespace keyhole::gpu {
namespace codes {
namespace {

WideKernels wide_kernels_of(const CodeShape& shape, uint32_t rows) {
  if (rows == 0 || shape.key_bits != shape.value_bits) return {};
  switch (shape.dim) {
    case 64: return wide_kernels_of_64(shape.key_bits, rows);
    case 80: return wide_kernels_of_80(shape.key_bits, rows);
    case 96: return wide_kernels_of_96(shape.key_bits, rows);
    case 128: return wide_kernels_of_128(shape.key_bits, rows);
    case 256: return wide_kernels_of_256(shape.key_bits, rows);
    default: return {};
  }
}

/// Query rows of a part of the step; the last part may have fewer.
uint32_t part_heads(const CodesStep& step) { return step.group / step.tokens * step.part_tokens; }
/// The kernels that follow the pass: those of steps of as many query rows as the first part has.
Kernels part_kernels(const CodesStep& step) { return kernels_of(step.shape, part_heads(step)); }
/// That of all parts together.
const void* finish_of(const WideKernels& kernels, const CodesStep& step) {
  const uint32_t heads = part_heads(step);
  return kernels.finish[heads <= 4 ? 0 : heads <= 8 ? 1 : 2];
}

/// Part `number` of a step, but for its work space.
CodesStep part_of(const CodesStep& step, uint32_t number) {
  const uint32_t heads = step.group / step.tokens, first = number * step.part_tokens;
  const size_t all_heads = size_t{step.kv_heads} * heads;
  CodesStep part = step;
  part.tokens = std::min(step.part_tokens, step.tokens - first);
  part.group = heads * part.tokens;
  const auto move = [&](auto& rows) {
    if (rows.data == nullptr) return;
    rows.data += static_cast<ptrdiff_t>(first) * rows.token_stride *
                 static_cast<ptrdiff_t>(dtype_size(rows.dtype));
    rows.tokens = part.tokens;
  };
  move(part.q);
  move(part.out);
  if (part.lse != nullptr) part.lse += first * all_heads;
  if (part.chosen != nullptr) part.chosen += size_t{number} * step.kv_heads * step.exact_rows;
  if (part.doubt.board != nullptr) {
    part.doubt.list += size_t{number} * step.kv_heads;
    part.doubt.records += size_t{number} * step.kv_heads;
    part.doubt.queries += first * all_heads * step.shape.dim;
  }
  for (uint32_t i = 0; first != 0 && i < part.tokens; ++i) {
    part.resident.sees[i] = step.resident.sees[first + i];
  }
  return part;
}

/// Lays out the work spaces of all parts one after the other; returns their bytes.
size_t lay_out_parts(const CodesStep& step, WideParams& params) {
  static_cast<CodesStep&>(params.step) = step;
  params.count = (step.tokens + step.part_tokens - 1) / step.part_tokens;
  size_t end = 0;
  for (uint32_t i = 0; i < params.count; ++i) {
    CodesStep part = part_of(step, i);
    if (part.work != nullptr) part.work += end;
    end += lay_out(part, part_kernels(step), params.parts[i]);
  }
  auto* const rings =
      step.work == nullptr ? nullptr : reinterpret_cast<RingState*>(step.work + end);
  params.step.rings = rings;
  for (uint32_t i = 0; i < params.count; ++i) params.parts[i].rings = rings;
  return end + size_t{step.kv_heads} * sizeof(RingState);
}

bool is_valid(const CodesStep& step, const WideKernels& kernels) {
  return kernels.attend != nullptr && step.tokens >= 1 && step.group % step.tokens == 0 &&
         step.group / step.tokens <= kMaxDeviceGroup && step.group <= kMostStepRows &&
         step.exact_rows <= kMostDeviceRows && step.splits >= 1 && step.splits <= kMostSplits &&
         step.kv_heads != 0 && step.part_tokens != 0 && step.stages >= kLeastStages &&
         step.stages <= kMostStages &&
         (step.group <= kMaxDeviceGroup ||
          (step.host_rows.requests == nullptr && step.resident_o == nullptr));
}

}  // namespace

uint32_t wide_fill(const CodeShape& shape, uint32_t kv_heads, uint32_t rows,
                   uint32_t multiprocessors, size_t shared_of_multiprocessor) {
  const WideKernels kernels = wide_kernels_of(shape, rows);
  if (kernels.attend == nullptr) return 1;
  const size_t shared = kernels.bytes(kLeastStages) + kReservedShared;
  const size_t resident = std::clamp<size_t>(shared_of_multiprocessor / shared, 1,
                                             static_cast<size_t>(kernels.occupancy));
  return std::clamp(multiprocessors * static_cast<uint32_t>(resident) / kv_heads, 1U, kMostSplits);
}

size_t wide_work_bytes(const CodesStep& step) {
  WideParams params;
  return lay_out_parts(step, params);
}

cudaError_t prepare_wide(CodesStep& step, int device, size_t* needs) {
  const WideKernels kernels = wide_kernels_of(step.shape, step.group);
  if (kernels.attend == nullptr) return cudaErrorInvalidValue;
  CodesStep part;
  size_t of_part = 0;
  cudaError_t status = cudaSuccess;
  step.trial = codes_trial();
  for (const uint32_t rows : {step.trial ? kPartRows : kMaxDeviceGroup, kMaxDeviceGroup}) {
    step.part_tokens = step_parts(step.group / step.tokens, step.tokens, rows).tokens;
    part = step;
    part.wide = false;
    part.tokens = 1;
    part.group = part_heads(step);
    status = prepare_codes(part, device, &of_part);
    if (status != cudaSuccess || part.cluster) break;
  }
  if (needs != nullptr) *needs = of_part;
  if (status != cudaSuccess) return status;
  step.cluster = part.cluster;
  step.processors = part.processors;
  step.shares = false;
  int per_block = 0, per_processor = 0;
  status = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  status =
      cudaDeviceGetAttribute(&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (status != cudaSuccess) return status;
  const size_t least = kernels.bytes(kLeastStages);
  if (needs != nullptr) *needs = std::max(of_part, least);
  if (least > static_cast<size_t>(per_block)) return cudaErrorNotSupported;
  // As many thread blocks as code_fill() counts with, and for these as many stages as there is space for.
  const int resident =
      std::clamp(per_processor / static_cast<int>(least + kReservedShared), 1, kernels.occupancy);
  const auto share =
      static_cast<size_t>(std::min(per_block, per_processor / resident - kReservedShared));
  step.stages = kLeastStages;
  while (step.stages < kMostStages && kernels.bytes(step.stages + 1) <= share) ++step.stages;
  status =
      cudaFuncSetAttribute(kernels.attend, cudaFuncAttributeMaxDynamicSharedMemorySize, per_block);
  if (status != cudaSuccess || !step.cluster) return status;
  cudaFuncAttributes attributes{};
  const void* const finish = finish_of(kernels, step);
  status = cudaFuncGetAttributes(&attributes, finish);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(finish, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              per_block - static_cast<int>(attributes.sharedSizeBytes));
}

cudaError_t attend_wide(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const WideKernels kernels = wide_kernels_of(step.shape, step.group);
  if (!is_valid(step, kernels)) return cudaErrorInvalidValue;
  WideParams params;
  lay_out_parts(step, params);
  void* arguments[] = {&params};
  return launch_ahead(kernels.attend, dim3(step.splits, step.kv_heads), dim3(kWideWarps * 32),
                      kernels.bytes(step.stages), stream, arguments, ahead);
}

cudaError_t finish_wide(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const WideKernels kernels = wide_kernels_of(step.shape, step.group);
  if (!is_valid(step, kernels)) return cudaErrorInvalidValue;
  WideParams params;
  lay_out_parts(step, params);
  const Kernels of_parts = part_kernels(step);
  const size_t bytes = shared_bytes(step, of_parts);
  const bool publishes = clusters(step) != step.kv_heads;
  if (step.cluster) {
    const void* const finish = finish_of(kernels, step);
    void* arguments[] = {&params};
    params.publishes = publishes;
    const uint32_t count = params.count * step.kv_heads + (publishes ? 1 : 0);
    return launch_clusters(finish, dim3(count * kFinishBlocks), bytes, stream, arguments, ahead);
  }
  // One part after the other; the first one publishes the whole step, behind whose tokens the others stand.
  cudaError_t status = cudaSuccess;
  for (uint32_t i = 0; i < params.count && status == cudaSuccess; ++i) {
    CodesParams& part = params.parts[i];
    if (i != 0) {
      part.resident.counts = false;
      part.resident.k.data = nullptr;
    }
    void* arguments[] = {&part};
    const uint32_t blocks = step.kv_heads * (publishes && i == 0 ? 2 : 1);
    status = launch_ahead(of_parts.finish_single, dim3(blocks), dim3(kSingleThreads), bytes, stream,
                          arguments, ahead && i == 0);
    if (status != cudaSuccess || step.doubt.board == nullptr || step.exact_rows == 0) continue;
    const SettleKernel settle = settle_kernel_of(step.shape);
    status = launch_ahead(settle.settle, dim3(step.processors), dim3(settle.warps * 32),
                          settle.shared, stream, arguments, false);
  }
  return status;
}

}  // namespace codes

bool codes_are_wide(uint32_t group) { return group > kMaxDeviceGroup; }

}  // namespace keyhole::gpu
