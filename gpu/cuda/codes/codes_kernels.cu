#include "gpu/cuda/codes/codes_kernels.h"

#include <algorithm>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/batch_params.h"
#include "gpu/cuda/codes/choose.cuh"
#include "gpu/cuda/codes/choose_single.cuh"
#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/launch.h"

namespace keyhole::gpu {
namespace codes {

Kernels kernels_of(const CodeShape& shape, uint32_t group) {
  if (group == 0 || group > kMaxDeviceGroup || shape.key_bits != shape.value_bits) return {};
  switch (shape.dim) {
    case 64: return kernels_of_64(shape.key_bits, group);
    case 80: return kernels_of_80(shape.key_bits, group);
    case 96: return kernels_of_96(shape.key_bits, group);
    case 128: return kernels_of_128(shape.key_bits, group);
    case 256: return kernels_of_256(shape.key_bits, group);
    case 512: return kernels_of_512(shape.key_bits, group);
    default: return {};
  }
}

Kernels kernels_of(const CodesStep& step) {
  const Kernels kernels = kernels_of(step.shape, step.group);
  return step.narrow ? kernels.narrowed(kernels_of(step.shape, narrow_heads(step.shape.dim)))
                     : kernels;
}

namespace {

BatchKernels batch_kernels_of(const CodeShape& shape, uint32_t group) {
  if (group == 0 || shape.key_bits != shape.value_bits) return {};
  switch (shape.key_bits) {
    case 2: return batch_kernels_of_2_bits(shape.dim, group);
    case 4: return batch_kernels_of_4_bits(shape.dim, group);
    default: return {};
  }
}

}  // namespace

SettleKernel settle_kernel_of(const CodeShape& shape) {
  switch (shape.key_bits) {
    case 2: return settle_kernel_of_2_bits(shape.dim);
    case 4: return settle_kernel_of_4_bits(shape.dim);
    default: return {};
  }
}

size_t lay_out(const CodesStep& step, const Kernels& kernels, CodesParams& params) {
  static_cast<CodesStep&>(params) = step;
  params.padded_heads = kernels.heads;
  size_t end = 0;
  const auto take = [&](size_t bytes) {
    const size_t at = end;
    end += (bytes + 127) / 128 * 128;
    return step.work == nullptr ? nullptr : step.work + at;
  };
  const size_t states = size_t{step.kv_heads} * step.splits * step.group;
  params.maxima = reinterpret_cast<float*>(
      take(size_t{step.kv_heads} * most_groups(step) * kernels.heads * sizeof(float)));
  params.part_o = reinterpret_cast<float*>(take(states * step.shape.dim * sizeof(float)));
  params.part_sum = reinterpret_cast<float2*>(take(states * sizeof(float2)));
  params.part_lse = reinterpret_cast<float*>(take(states * sizeof(float)));
  const size_t parts = (step.group + kDoubtHeads - 1) / kDoubtHeads;
  params.found = reinterpret_cast<uint32_t*>(
      take(size_t{step.kv_heads} * parts * step.block_capacity * kBlockMaxima * sizeof(uint32_t)));
  if (step.lists.list_capacity == 0) return end;
  const size_t lists = size_t{step.kv_heads} * step.lists.list_capacity;
  params.list_scores = reinterpret_cast<float*>(take(lists * kernels.heads * sizeof(float)));
  params.list_weights = reinterpret_cast<float*>(take(lists * kernels.heads * sizeof(float)));
  params.list_bins = reinterpret_cast<uint32_t*>(take(lists * sizeof(uint32_t)));
  params.list_ends =
      reinterpret_cast<ChosenLists*>(take(size_t{step.kv_heads} * sizeof(ChosenLists)));
  params.list_pairs = reinterpret_cast<ListedPair*>(
      take(size_t{step.kv_heads} * most_groups(step) * sizeof(ListedPair)));
  if (!step.lists.by_memory) return end;
  params.told_stride = told_bytes(kernels.heads);
  params.told = take(size_t{step.kv_heads} * step.lists.blocks * params.told_stride);
  return end;
}

namespace {

/// Whether the parts of a step go together with its lists, if it has some.
bool fits_lists(const CodesStep& step) {
  const CodesLists& l = step.lists;
  return l.list_capacity == 0 ||
         (l.blocks != 0 && !step.wide && step.host_rows.requests == nullptr);
}

}  // namespace

bool valid(const CodesStep& step, const Kernels& kernels) {
  if (!fits_lists(step)) return false;
  return kernels.attend != nullptr && step.exact_rows <= kMostDeviceRows && step.splits >= 1 &&
         step.splits <= kMostSplits && step.kv_heads != 0 && step.stages >= kLeastStages &&
         step.stages <= kMostStages;
}

namespace {

/// Whether a step with lists takes less time alone than its part of a launch of several, in which all its codes are
/// read: from where lists take some two thirds of what is added to such a launch, by the times of an H100
/// (bench/RESULTS.md, "Lists of codes on a device"). A copy of another session may share the codes that it reads with
/// it.
bool gains_alone(const CodesStep& step) {
  constexpr size_t kLongBytes =
      200'000'000;  // of a layer, 190,000 tokens of 8 KV heads of 128 at 4 bits
  if (step.lists.list_capacity == 0 || step.family != nullptr) return false;
  return step.block_capacity * step.block_stride >= kLongBytes;
}

/// Shared memory of attend_codes(), beside what the kernel declares.
size_t attend_bytes(const CodesStep& step, const Kernels& kernels) {
  return std::max(kernels.attend_shared, static_cast<size_t>(step.stages) * kernels.attend_stage);
}

/// Lets attend_codes() have all shared memory of a multiprocessor, and chooses the stages. needs: bytes that it takes
/// at least.
cudaError_t prepare_attend(CodesStep& step, const Kernels& kernels, const SharedMemory& memory,
                           size_t& needs) {
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernels.attend);
  if (status != cudaSuccess) return status;
  const int per_block = static_cast<int>(memory.of_block);
  const int fixed = static_cast<int>(attributes.sharedSizeBytes);
  const int share =
      std::min(per_block, static_cast<int>(memory.of_multiprocessor) / kernels.attend_occupancy -
                              kReservedShared);
  step.stages = std::clamp((share - fixed) / static_cast<int>(kernels.attend_stage), kLeastStages,
                           kMostStages);
  // 4 bits take more than the 99 KiB of 8.6, 8.9 and 12.0 for groups above 8 with d = 128, above 4 with d = 256.
  needs = attributes.sharedSizeBytes + attend_bytes(step, kernels);
  if (needs > memory.of_block) return cudaErrorNotSupported;
  const BatchKernels batch = batch_kernels_of(step.shape, step.group);
  for (const void* kernel : {kernels.attend, kernels.attend_lists, batch.attend}) {
    if (kernel == nullptr || status != cudaSuccess) continue;
    // All of them declare the same shared memory.
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  per_block - fixed);
  }
  step.shares = batch.family[1] != nullptr;
  for (const void* kernel : batch.family) {
    if (kernel == nullptr || status != cudaSuccess) continue;
    status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) break;
    const int left = per_block - static_cast<int>(attributes.sharedSizeBytes);
    step.shares =
        step.shares && attend_bytes(step, kernels) <= static_cast<size_t>(std::max(left, 0));
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  std::max(left, 0));
  }
  return status;
}

/// Lets the kernel that takes up heads in doubt have all shared memory of a thread block. needs: as prepare_attend().
cudaError_t prepare_settle(const CodesStep& step, const SharedMemory& memory, size_t& needs) {
  const SettleKernel kernel = settle_kernel_of(step.shape);
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel.settle);
  if (status != cudaSuccess) return status;
  needs = std::max(needs, attributes.sharedSizeBytes + kernel.shared);
  if (needs > memory.of_block) return cudaErrorNotSupported;
  return cudaFuncSetAttribute(kernel.settle, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(memory.of_block - attributes.sharedSizeBytes));
}

}  // namespace

uint32_t clusters(const CodesStep& step) {
  return step.kv_heads + (step.has_resident && step.resident.counts ? 1 : 0);
}

cudaError_t launch_clusters(const void* kernel, dim3 grid, size_t bytes, cudaStream_t stream,
                            void** arguments, bool ahead, uint32_t blocks) {
  static_assert(kListThreads == kFinishThreads);  // of the clusters that choose among lists, too
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {blocks, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kFinishThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ahead ? 2 : 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

uint32_t count_clusters(const void* kernel, size_t bytes, uint32_t blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kFinishThreads);
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess) {
    return static_cast<uint32_t>(std::max(count, 0));
  }
  static_cast<void>(cudaGetLastError());  // what follows does not fail for it
  return 0;
}

size_t least_attend_bytes(const Kernels& kernels) {
  return kernels.attend_fixed +
         std::max(kernels.attend_shared, kLeastStages * kernels.attend_stage);
}

size_t shared_bytes(const CodesStep& step, const Kernels& kernels) {
  if (!step.cluster) return kernels.single_shared;
  const size_t turns = (size_t{most_groups(step)} + kClusterThreads - 1) / kClusterThreads;
  return std::max(kernels.finish_shared + turns * kFinishThreads * sizeof(float),
                  kernels.settle_shared);
}
namespace {

/// shared_bytes() plus what the kernel declares.
cudaError_t all_shared_bytes(const CodesStep& step, const Kernels& kernels, size_t& bytes) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(
      &attributes, step.cluster ? kernels.finish_parts : kernels.finish_single_parts);
  bytes = attributes.sharedSizeBytes + shared_bytes(step, kernels);
  return status;
}

}  // namespace

cudaError_t prepare_finish(CodesStep& step, int device, size_t& needs) {
  const Kernels kernels = kernels_of(step);
  if (kernels.finish_parts == nullptr) return cudaErrorInvalidValue;
  const SharedMemory memory = shared_memory_of(device);
  int processors = 1;
  cudaError_t status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  step.processors = static_cast<uint32_t>(processors);
  step.cluster = step.cluster && kernels_have_clusters(device);
  status = all_shared_bytes(step, kernels, needs);
  if (status == cudaSuccess && step.cluster && needs > memory.of_block) {
    step.cluster = false;
    status = all_shared_bytes(step, kernels, needs);
  }
  if (status != cudaSuccess) return status;
  if (needs > memory.of_block) return cudaErrorNotSupported;
  // Clusters settle their heads themselves: the kernel is not even loaded.
  if (!step.cluster) status = prepare_settle(step, memory, needs);
  if (status != cudaSuccess) return status;
  // Allows all shared memory that there is, not what this step needs: the limit belongs to the function, and steps of
  // other capacities share it.
  const auto allow = [&](const void* kernel) {
    cudaFuncAttributes attributes{};
    const cudaError_t failed = cudaFuncGetAttributes(&attributes, kernel);
    if (failed != cudaSuccess) return failed;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(memory.of_block - attributes.sharedSizeBytes));
  };
  const void* const by_cluster[] = {kernels.finish, kernels.finish_parts,
                                    batch_kernels_of(step.shape, step.group).finish};
  const void* const by_block[] = {kernels.finish_single, kernels.finish_single_parts, nullptr};
  for (const void* kernel : step.cluster ? by_cluster : by_block) {
    if (kernel != nullptr && status == cudaSuccess) status = allow(kernel);
  }
  return status;
}

void find_families(BatchParams& batch, uint32_t most) {
  for (uint32_t i = 0; i < batch.count; ++i) {
    const void* const family = batch.steps[i].family;
    uint8_t members[kMostJointSteps];
    uint32_t count = 0;
    for (uint32_t j = 0; j < batch.count; ++j) {
      const bool is_own = batch.steps[j].family == family && family != nullptr;
      if (is_own && j < i) break;  // they are divided
      if (is_own) members[count++] = static_cast<uint8_t>(j);
    }
    const uint32_t parts = (count + most - 1) / most;
    for (uint32_t part = 0; part < parts; ++part) {
      const uint32_t begin = part * count / parts, end = (part + 1) * count / parts;
      if (end - begin < 2) continue;
      Family& f = batch.families[batch.family_count];
      f.count = static_cast<uint8_t>(end - begin);
      for (uint32_t k = begin; k < end; ++k) {
        f.members[k - begin] = members[k];
        batch.family_of[members[k]] = static_cast<uint8_t>(batch.family_count);
      }
      ++batch.family_count;
    }
  }
}

}  // namespace codes

bool codes_are_narrow(const CodeShape& shape, uint32_t group, size_t shared_of_block) {
  const codes::Kernels kernels = codes::kernels_of(shape, group);
  return kernels.attend != nullptr && group > narrow_heads(shape.dim) &&
         codes::least_attend_bytes(kernels) > shared_of_block;
}

bool codes_have_kernels(const CodeShape& shape, uint32_t group) {
  return codes::kernels_of(shape, group).finish_parts != nullptr;
}

uint32_t code_fill(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                   uint32_t multiprocessors, size_t shared_of_multiprocessor, bool wide,
                   bool narrow) {
  if (wide) {
    return codes::wide_fill(shape, kv_heads, group, multiprocessors, shared_of_multiprocessor);
  }
  CodesStep step;
  step.shape = shape;
  step.group = group;
  step.narrow = narrow;
  const codes::Kernels kernels = codes::kernels_of(step);
  if (kernels.attend == nullptr) return 1;
  CodesStep least;
  least.stages = codes::kLeastStages;
  const size_t shared =
      kernels.attend_fixed + codes::attend_bytes(least, kernels) + codes::kReservedShared;
  const size_t resident = std::clamp<size_t>(shared_of_multiprocessor / shared, 1,
                                             static_cast<size_t>(kernels.attend_occupancy));
  const uint32_t blocks = multiprocessors * static_cast<uint32_t>(resident);
  return std::clamp(blocks / (kv_heads * kernels.attend_passes(group)), 1U, codes::kMostSplits);
}

uint32_t code_splits(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                     uint32_t block_capacity, uint32_t multiprocessors,
                     size_t shared_of_multiprocessor, uint32_t resident_capacity, bool wide,
                     bool narrow) {
  const codes::Kernels kernels = codes::kernels_of(shape, wide ? 1 : group);
  if (kernels.finish_parts == nullptr) return 1;
  const uint32_t most =
      code_fill(shape, kv_heads, group, multiprocessors, shared_of_multiprocessor, wide, narrow);
  // A warp has 32 rows of codes or more; resident tokens come 32 to a thread block at once. The pass for many query
  // rows takes 128 rows of codes by a thread block.
  const uint64_t wanted =
      uint64_t{block_capacity} * codes::kBlockMaxima / (wide ? 4 : kernels.attend_warps) +
      resident_capacity / 32;
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most));
}

size_t codes_work_bytes(const CodesStep& step) {
  if (step.wide) return codes::wide_work_bytes(step);
  codes::CodesParams params;
  return codes::lay_out(step, codes::kernels_of(step), params);
}

cudaError_t prepare_codes(CodesStep& step, int device, size_t* needs) {
  if (step.wide) return codes::prepare_wide(step, device, needs);
  const codes::Kernels kernels = codes::kernels_of(step);
  if (kernels.attend == nullptr) return cudaErrorInvalidValue;
  const SharedMemory memory = shared_memory_of(device);
  step.block_shared = memory.of_block;
  size_t least = 0, finish = 0;
  cudaError_t status = codes::prepare_attend(step, kernels, memory, least);
  const cudaError_t known = codes::prepare_finish(step, device, finish);
  if (needs != nullptr) *needs = std::max(least, finish);
  if (status == cudaSuccess) status = known;
  if (status != cudaSuccess || step.lists.list_capacity == 0) return status;
  return codes::prepare_choice(step, device, memory.of_block);
}

cudaError_t attend_codes(const CodesStep& step, cudaStream_t stream, bool ahead) {
  if (step.wide) return codes::attend_wide(step, stream, ahead);
  const codes::Kernels kernels = codes::kernels_of(step);
  if (!codes::valid(step, kernels)) return cudaErrorInvalidValue;
  codes::CodesParams params;
  codes::lay_out(step, kernels, params);
  void* arguments[] = {&params};
  if (step.lists.list_capacity != 0) {
    const cudaError_t status = choose_lists(step, stream, ahead && step.cluster);
    if (status != cudaSuccess) return status;
    return launch_ahead(kernels.attend_lists,
                        dim3(step.splits, step.kv_heads, kernels.attend_passes(step.group)),
                        dim3(kernels.attend_warps * 32), codes::attend_bytes(step, kernels), stream,
                        arguments, !step.lists.by_memory);
  }
  return launch_ahead(kernels.attend,
                      dim3(step.splits, step.kv_heads, kernels.attend_passes(step.group)),
                      dim3(kernels.attend_warps * 32), codes::attend_bytes(step, kernels), stream,
                      arguments, ahead && step.cluster);
}

cudaError_t finish_codes(const CodesStep& step, cudaStream_t stream, bool ahead) {
  if (step.wide) return codes::finish_wide(step, stream, ahead);
  const codes::Kernels kernels = codes::kernels_of(step);
  if (!codes::valid(step, kernels)) return cudaErrorInvalidValue;
  codes::CodesParams params;
  codes::lay_out(step, kernels, params);
  const size_t bytes = codes::shared_bytes(step, kernels);
  void* arguments[] = {&params};
  if (!step.cluster) {
    const bool publishes = codes::clusters(step) != step.kv_heads;
    return launch_ahead(kernels.finish_single, dim3(step.kv_heads * (publishes ? 2 : 1)),
                        dim3(codes::kSingleThreads), bytes, stream, arguments, false);
  }
  return codes::launch_clusters(kernels.finish, dim3(codes::clusters(step) * codes::kFinishBlocks),
                                bytes, stream, arguments, ahead);
}

cudaError_t settle_codes(const CodesStep& step, cudaStream_t stream) {
  if (step.doubt.board == nullptr || step.exact_rows == 0 || step.cluster) return cudaSuccess;
  if (step.wide) return cudaSuccess;  // finish_codes() has enqueued it for each part
  const codes::Kernels kernels = codes::kernels_of(step);
  if (!codes::valid(step, kernels)) return cudaErrorInvalidValue;
  codes::CodesParams params;
  codes::lay_out(step, kernels, params);
  const codes::SettleKernel kernel = codes::settle_kernel_of(step.shape);
  void* arguments[] = {&params};
  // It is not launched ahead of the end of the kernel before it: a kernel that follows one so launched would take 4
  // us more.
  return launch_ahead(kernel.settle, dim3(step.processors), dim3(kernel.warps * 32), kernel.shared,
                      stream, arguments, false);
}

CodesKind codes_kind(const CodesStep& step) {
  const bool is_one = step.tokens == 1 || step.lists.list_capacity == 0;
  const bool joins = step.cluster && !step.wide && is_one && !codes::gains_alone(step) &&
                     step.host_rows.requests == nullptr && step.resident_o == nullptr;
  if (!joins) return {};
  const codes::BatchKernels kernels = codes::batch_kernels_of(step.shape, step.group);
  return {kernels.attend, step.kv_heads, codes::clusters(step), step.fill, step.stages};
}

cudaError_t step_codes(std::span<const CodesStep> steps, cudaStream_t stream, bool ahead) {
  if (steps.empty() || steps.size() > kMostJointSteps) return cudaErrorInvalidValue;
  const CodesStep& first = steps[0];
  if (steps.size() == 1) {
    cudaError_t status = attend_codes(first, stream, ahead);
    if (status == cudaSuccess) status = finish_codes(first, stream, ahead);
    return status != cudaSuccess ? status : settle_codes(first, stream);
  }
  const codes::Kernels kernels = codes::kernels_of(first);
  const codes::BatchKernels batch = codes::batch_kernels_of(first.shape, first.group);
  codes::BatchParams params;
  size_t bytes = 0;
  for (CodesStep step : steps) {
    const bool is_alike = batch.attend != nullptr && codes_kind(step) == codes_kind(first);
    if (!is_alike || !codes::valid(step, kernels)) return cudaErrorInvalidValue;
    step.lists = {};
    codes::lay_out(step, kernels, params.steps[params.count]);
    const RingShape& ring = step.resident.ring;
    const uint32_t resident = step.has_resident ? ring.sink + ring.capacity : 0;
    params.resident_cost[params.count++] = resident / (kCodeBlock / codes::kResidentRowCost);
    bytes = std::max(bytes, codes::shared_bytes(step, kernels));
  }
  params.blocks = std::max(first.fill, params.count);
  void* arguments[] = {&params};
  std::fill(std::begin(params.family_of), std::end(params.family_of), codes::kNoFamily);
  const uint32_t tiles = first.group > 4 ? 2 : 1;
  if (first.shares) codes::find_families(params, codes::Family::kMost / tiles);
  cudaError_t status = cudaSuccess;
  if (params.family_count != 0) {
    uint32_t heads = 0;
    for (uint32_t f = 0; f < params.family_count; ++f) {
      heads = std::max(heads, params.families[f].count * tiles * 4);
    }
    // Thread blocks of 8 heads fill a multiprocessor by two, those of 16 alone.
    const uint32_t fill = heads <= 8 ? first.fill : std::max(first.fill / 2, 1U);
    params.family_blocks = std::max(fill, params.family_count);
    status =
        launch_ahead(batch.family[heads <= 8 ? 0 : 1], dim3(params.family_blocks, first.kv_heads),
                     dim3(kernels.attend_warps * 32), codes::attend_bytes(first, kernels), stream,
                     arguments, ahead);
    if (status != cudaSuccess) return status;
  }
  status = launch_ahead(batch.attend, dim3(params.blocks, first.kv_heads),
                        dim3(kernels.attend_warps * 32), codes::attend_bytes(first, kernels),
                        stream, arguments, ahead);
  if (status != cudaSuccess) return status;
  return codes::launch_clusters(batch.finish,
                                dim3(codes::clusters(first) * codes::kFinishBlocks, params.count),
                                bytes, stream, arguments, ahead);
}

}  // namespace keyhole::gpu
