// Steps of many query rows (gpu/cuda/codes/wide.cuh): their parts, and the launches of their kernels.
#include <algorithm>

#include "gpu/cuda/codes/choose.cuh"
#include "gpu/cuda/codes/choose_single.cuh"
#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/codes/warpgroup_kernels.h"
#include "gpu/cuda/codes/wide_params.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/launch.h"
#include "gpu/step.h"

namespace keyhole::gpu {
namespace codes {
namespace {

/// The kernels that follow the pass, for parts of the step's tokens; it is prepared.
Kernels part_kernels(const CodesStep& step) {
  return kernels_of(step.shape, step.group / step.tokens * step.part_tokens);
}

/// The kernel whose thread blocks have all of so many query rows.
WideKernels kernels_of_rows(const CodeShape& shape, uint32_t rows) {
  switch (shape.dim) {
    case 64: return wide_kernels_of_64(shape.key_bits, rows);
    case 80: return wide_kernels_of_80(shape.key_bits, rows);
    case 96: return wide_kernels_of_96(shape.key_bits, rows);
    case 128: return wide_kernels_of_128(shape.key_bits, rows);
    case 256: return wide_kernels_of_256(shape.key_bits, rows);
    case 512: return wide_kernels_of_512(shape.key_bits, rows);
    default: return {};
  }
}

/// The kernel that takes the fewest passes for so many query rows in thread blocks of at most `most` bytes of shared
/// memory; where none has so few bytes, that with the fewest.
WideKernels general_kernels_of(const CodeShape& shape, uint32_t rows, size_t most) {
  if (rows == 0 || shape.key_bits != shape.value_bits) return {};
  WideKernels kernels = kernels_of_rows(shape, rows);
  if (kernels.attend == nullptr) return {};
  for (uint32_t fewer = kernels.rows - 8; fewer >= 8 && !kernels.fits(most); fewer -= 8) {
    kernels = kernels_of_rows(shape, fewer);
  }
  if (!kernels.fits(most) && shape.dim == 256 && shape.key_bits == 4) {
    kernels = small_wide_kernels_of_256(rows);
  }
  return kernels;
}
/// warpgroups: CodesStep::warpgroups.
WideKernels wide_kernels_of(const CodeShape& shape, uint32_t rows, size_t most, bool warpgroups) {
  const WideKernels general = general_kernels_of(shape, rows, most);
  if (!warpgroups || general.attend == nullptr) return general;
  WideKernels kernels = group_kernels_of(shape, rows);
  if (kernels.attend == nullptr || !kernels.fits(most)) return general;
  kernels.rows = rows;
  return kernels;
}
WideKernels wide_kernels_of(const CodesStep& step) {
  return wide_kernels_of(step.shape, step.group, step.block_shared, step.warpgroups);
}

/// Thread blocks that share the query rows of a part of the codes.
uint32_t passes_of(const WideKernels& kernels, uint32_t rows) {
  return (rows + kernels.rows - 1) / kernels.rows;
}

/// Part `number` of a step, but for its work space.
CodesStep part_of(const CodesStep& step, const StepParts& parts, uint32_t number) {
  const uint32_t heads = step.group / step.tokens, first = number * parts.tokens;
  const size_t all_heads = size_t{step.kv_heads} * heads;
  CodesStep part = step;
  part.tokens = std::min(parts.tokens, step.tokens - first);
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
    part.doubt.board += number;
    part.doubt.list += size_t{number} * step.kv_heads;
    part.doubt.records += size_t{number} * step.kv_heads;
    part.doubt.queries += first * all_heads * step.shape.dim;
  }
  for (uint32_t i = 0; first != 0 && i < part.tokens; ++i) {
    part.resident.sees[i] = step.resident.sees[first + i];
  }
  return part;
}

/// Tokens of a part at least: there is room for kMostStepParts.
uint32_t least_part_tokens(const CodesStep& step) {
  return (step.tokens + kMostStepParts - 1) / kMostStepParts;
}
/// Whether there is room for parts of step.part_tokens tokens, and there are kernels for so many rows of each.
bool has_parts(const CodesStep& step) {
  return step.part_tokens >= least_part_tokens(step) &&
         step.group / step.tokens * step.part_tokens <= kMaxDeviceGroup;
}

/// Lays out the work spaces of all parts one after the other; returns their bytes.
size_t lay_out_parts(const CodesStep& step, WideParams& params) {
  const StepParts parts =
      parts_of_tokens(step.tokens, std::max(step.part_tokens, least_part_tokens(step)));
  static_cast<CodesStep&>(params.step) = step;
  params.count = parts.count;
  size_t end = 0;
  for (uint32_t i = 0; i < parts.count; ++i) {
    CodesStep part = part_of(step, parts, i);
    if (part.work != nullptr) part.work += end;
    end += lay_out(part, part_kernels(step), params.parts[i]);
  }
  return end;
}

/// prepare_finish() for parts of step.part_tokens tokens; needs: as there.
cudaError_t prepare_part(CodesStep& step, int device, size_t& needs) {
  CodesStep part = step;
  part.wide = false;
  part.tokens = 1;
  part.group = step.group / step.tokens * step.part_tokens;
  const cudaError_t status = prepare_finish(part, device, needs);
  step.cluster = part.cluster;
  step.processors = part.processors;
  if (status == cudaSuccess && step.cluster) {
    const Kernels kernels = part_kernels(step);
    step.clusters_at_once = count_clusters(kernels.finish_parts, shared_bytes(step, kernels));
  }
  return status;
}

/// The same, and chooses part_tokens where it is 0: parts as small as can be, because a part of few query rows is
/// finished sooner, of which the device has all clusters at once, and that which publishes the step; by one thread
/// block each, of which there is room for many, of one token.
cudaError_t prepare_parts(CodesStep& step, int device, size_t& needs) {
  const uint32_t heads = step.group / step.tokens;
  const uint32_t fewest = step_parts(heads, step.tokens).tokens;
  const uint32_t least = least_part_tokens(step);
  if (step.part_tokens != 0) return prepare_part(step, device, needs);
  for (step.part_tokens = least;; ++step.part_tokens) {
    const cudaError_t status = prepare_part(step, device, needs);
    if (status != cudaSuccess) return status;
    if (!step.cluster) {
      if (step.part_tokens == least) return status;
      // There is no shared memory for clusters of so many query rows: those before are not all there at once.
      step.cluster = true;
      --step.part_tokens;
      return prepare_part(step, device, needs);
    }
    const uint32_t parts = parts_of_tokens(step.tokens, step.part_tokens).count;
    const bool at_once = parts * step.kv_heads + 1 <= step.clusters_at_once;
    if (at_once || step.part_tokens >= fewest) return status;
  }
}

bool is_valid(const CodesStep& step, const WideKernels& kernels) {
  return kernels.attend != nullptr && step.tokens >= 1 && step.group % step.tokens == 0 &&
         has_parts(step) && step.group <= kMostStepRows && step.exact_rows <= kMostDeviceRows &&
         step.splits >= 1 && step.splits <= kMostSplits && step.kv_heads != 0 &&
         step.stages >= kernels.least_stages() && step.stages <= kMostStages &&
         (step.group <= kMaxDeviceGroup || step.host_rows.requests == nullptr) &&
         // Such states lie head by head, and not token by token.
         (step.tokens == 1 || step.resident_o == nullptr);
}

}  // namespace

uint32_t wide_fill(const CodeShape& shape, uint32_t kv_heads, uint32_t rows,
                   uint32_t multiprocessors, size_t shared_of_multiprocessor) {
  const size_t of_block = shared_of_multiprocessor - kReservedShared;
  const WideKernels kernels = wide_kernels_of(shape, rows, of_block, warpgroups_run_here());
  if (kernels.attend == nullptr) return 1;
  const size_t shared = kernels.bytes(kernels.first_stages(of_block)) + kReservedShared;
  const size_t resident = std::clamp<size_t>(shared_of_multiprocessor / shared, 1,
                                             static_cast<size_t>(kernels.occupancy));
  const uint32_t blocks = multiprocessors * static_cast<uint32_t>(resident);
  return std::clamp(blocks / (kv_heads * passes_of(kernels, rows)), 1U, kMostSplits);
}

size_t wide_work_bytes(const CodesStep& step) {
  WideParams params;
  return lay_out_parts(step, params);
}

cudaError_t prepare_wide(CodesStep& step, int device, size_t* needs) {
  const SharedMemory memory = shared_memory_of(device);
  step.block_shared = memory.of_block;
  step.warpgroups = warpgroups_run_here();
  const WideKernels kernels = wide_kernels_of(step);
  const bool is_possible = step.part_tokens == 0 || has_parts(step);
  if (kernels.attend == nullptr || !is_possible) return cudaErrorInvalidValue;
  size_t of_part = 0;
  cudaError_t status = prepare_parts(step, device, of_part);
  if (needs != nullptr) *needs = of_part;
  if (status != cudaSuccess) return status;
  step.shares = false;
  step.stages = kernels.first_stages(memory.of_block);
  const size_t least = kernels.bytes(step.stages);
  if (needs != nullptr) *needs = std::max(of_part, least);
  if (least > memory.of_block) return cudaErrorNotSupported;
  // As many thread blocks as code_fill() counts with, and for these as many stages as there is space for.
  const size_t resident = std::clamp<size_t>(memory.of_multiprocessor / (least + kReservedShared),
                                             1, static_cast<size_t>(kernels.occupancy));
  const size_t share =
      std::min(memory.of_block, memory.of_multiprocessor / resident - kReservedShared);
  while (step.stages < kMostStages && kernels.bytes(step.stages + 1) <= share) ++step.stages;
  return cudaFuncSetAttribute(kernels.attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(memory.of_block));
}

cudaError_t attend_wide(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const WideKernels kernels = wide_kernels_of(step);
  if (!is_valid(step, kernels)) return cudaErrorInvalidValue;
  WideParams params;
  lay_out_parts(step, params);
  void* arguments[] = {&params};
  return launch_ahead(
      kernels.attend, dim3(step.splits, step.kv_heads, passes_of(kernels, step.group)),
      dim3(kernels.threads), kernels.bytes(step.stages), stream, arguments, ahead && step.cluster);
}

cudaError_t finish_wide(const CodesStep& step, cudaStream_t stream, bool ahead) {
  const WideKernels kernels = wide_kernels_of(step);
  if (!is_valid(step, kernels)) return cudaErrorInvalidValue;
  WideParams params;
  lay_out_parts(step, params);
  const Kernels of_parts = part_kernels(step);
  const size_t bytes = shared_bytes(step, of_parts);
  const bool publishes = clusters(step) != step.kv_heads;
  if (step.cluster) {
    void* arguments[] = {&params};
    const uint32_t of_heads = params.count * step.kv_heads;
    // The ring may advance when all clusters have read it, which is so where all of them are there at once.
    const bool together = of_heads + 1 <= step.clusters_at_once;
    const uint32_t count = of_heads + (publishes && together ? 1 : 0);
    const cudaError_t status = launch_clusters(of_parts.finish_parts, dim3(count * kFinishBlocks),
                                               bytes, stream, arguments, ahead);
    if (status != cudaSuccess || !publishes || together) return status;
    params.count = 0;  // of a step without parts the first cluster publishes
    return launch_clusters(of_parts.finish_parts, dim3(kFinishBlocks), bytes, stream, arguments,
                           false);
  }
  // Thread blocks of all parts at once. Those behind them publish the whole step.
  void* arguments[] = {&params};
  const uint32_t blocks = step.kv_heads * (params.count + (publishes ? 1 : 0));
  cudaError_t status = launch_ahead(of_parts.finish_single_parts, dim3(blocks),
                                    dim3(kSingleThreads), bytes, stream, arguments, false);
  if (step.doubt.board == nullptr || step.exact_rows == 0) return status;
  const SettleKernel settle = settle_kernel_of(step.shape);
  for (uint32_t i = 0; i < params.count && status == cudaSuccess; ++i) {
    CodesParams& part = params.parts[i];
    // The ring has taken the step's tokens: the first part stands for them, behind which the others are.
    if (i != 0) {
      part.resident.counts = false;
      part.resident.k.data = nullptr;
    }
    void* of_part[] = {&part};
    status = launch_ahead(settle.settle, dim3(step.processors), dim3(settle.warps * 32),
                          settle.shared, stream, of_part, false);
  }
  return status;
}

}  // namespace codes

bool codes_are_wide(const CodeShape& shape, uint32_t group, size_t shared_of_block,
                    uint32_t tokens) {
  if (group > kMaxDeviceGroup || shape.dim > 256) return true;
  if (tokens > 1 && codes::warpgroups_run_here()) {
    const codes::WideKernels kernels = codes::group_kernels_of(shape, group);
    if (kernels.attend != nullptr && kernels.fits(shared_of_block)) return true;
  }
  const codes::Kernels kernels = codes::kernels_of(shape, group);
  return kernels.attend != nullptr && codes::least_attend_bytes(kernels) > shared_of_block;
}

}  // namespace keyhole::gpu
