#include "gpu/cuda/codes/codes_variants.h"

#include <algorithm>
#include <string>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/kernel_generation.h"

namespace keyhole::gpu {
namespace {

int attribute(cudaDeviceAttr name, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, ordinal), "the device's limits");
  return value;
}

/// lists: with lists.
CodesStep sizes_of(const CodesShape& shape, const CodesLayout& layout, int ordinal,
                   uint32_t resident_tokens, uint32_t tokens, bool lists) {
  const auto processors = static_cast<uint32_t>(attribute(cudaDevAttrMultiProcessorCount, ordinal));
  const SharedMemory memory = shared_memory_of(ordinal);
  const size_t shared = memory.of_multiprocessor;
  CodesStep s;
  s.shape = shape.code;
  s.kv_heads = shape.kv_heads;
  s.group = shape.q_heads / shape.kv_heads * tokens;
  s.tokens = tokens;
  s.block_capacity = std::max(shape.blocks, 1U);
  s.wide = !lists && codes_are_wide(shape.code, s.group, memory.of_block, tokens);
  s.narrow = lists && codes_are_narrow(shape.code, s.group, memory.of_block);
  s.fill = code_fill(shape.code, shape.kv_heads, s.group, processors, shared, s.wide, s.narrow);
  s.splits = std::min(code_splits(shape.code, shape.kv_heads, s.group, s.block_capacity, processors,
                                  shared, resident_tokens, s.wide, s.narrow),
                      most_code_splits(shape.kv_heads));
  s.block_stride = layout.block_stride;
  s.head_stride = layout.head_stride;
  if (shape.rows_by_host) s.part_tokens = tokens;  // the host has places for one part
  s.dtype = shape.dtype;
  s.row_stride = shape.code.dim * dtype_size(shape.dtype);
  if (lists) {
    s.lists.list_capacity = layout.lists.lists;
    s.lists.pair_capacity = layout.lists.pairs;
    s.lists.share = shape.list_share;
  }
  return s;
}

/// prepare_codes(), behind which the parts of the step are known, and so the exact rows of each: as many as the shape
/// says for every token, but what the host reads has places for one token's.
cudaError_t prepare(CodesStep& s, const CodesShape& shape, int ordinal, size_t* needs = nullptr) {
  const cudaError_t status = prepare_codes(s, ordinal, needs);
  const uint32_t choosing = s.wide ? s.part_tokens : s.tokens;
  s.exact_rows = shape.rows_by_host ? shape.exact_rows
                                    : std::min(shape.exact_rows * choosing, kMostDeviceRows);
  return status;
}

}  // namespace

static_assert(sizeof(codes::ChosenLists) <= kEndsOfLists);
static_assert(sizeof(ListMemory) <= kMemoryOfLists);

CodesVariants::CodesVariants(const CodesShape& shape, const CodesLayout& layout, int ordinal,
                             uint32_t resident_tokens) {
  const uint32_t group = shape.q_heads / shape.kv_heads;
  for (uint32_t tokens = 1; tokens <= most_codes_tokens(shape); ++tokens) {
    CodesStep s = sizes_of(shape, layout, ordinal, resident_tokens, tokens, false);
    size_t needs = 0;
    const cudaError_t status = prepare(s, shape, ordinal, tokens == 1 ? &needs : nullptr);
    if (tokens == 1 && status == cudaErrorNotSupported) {
      throw Error(Status::unsupported,
                  "codes on a CUDA device: head dimension " + std::to_string(shape.code.dim) +
                      ", " + std::to_string(shape.code.key_bits) + " bits and " +
                      std::to_string(group) + " query heads for a KV head take " +
                      std::to_string(needs) + " bytes of shared memory; the device has " +
                      std::to_string(shared_memory_of(ordinal).of_block));
    }
    if (tokens > 1 && (status == cudaErrorNotSupported || status == cudaErrorInvalidValue)) break;
    check(status, "the kernels of codes");
    sizes_.push_back(s);
  }
  const bool may_list = keyhole::gpu::has_lists(shape) && !shape.rows_by_host;
  const uint32_t most = may_list ? std::min(most_listed_tokens(shape), most_tokens()) : 0;
  for (uint32_t tokens = 1; tokens <= most; ++tokens) {
    CodesStep s = sizes_of(shape, layout, ordinal, resident_tokens, tokens, true);
    const cudaError_t status = prepare(s, shape, ordinal);
    if (status != cudaErrorNotSupported) check(status, "the kernels of codes in lists");
    if (status == cudaErrorNotSupported || s.lists.blocks == 0) break;
    listed_.push_back(s);
  }
  const auto check_work = [&](const CodesStep& s) {
    const size_t work = codes_work_bytes(s);
    if (work <= layout.work_bytes) return;
    throw Error(Status::internal, "codes on a CUDA device: a step's work space takes " +
                                      std::to_string(work) + " bytes, and " +
                                      std::to_string(layout.work_bytes) + " were planned");
  };
  for (const CodesStep& s : sizes_) check_work(s);
  for (const CodesStep& s : listed_) check_work(s);
}

}  // namespace keyhole::gpu
