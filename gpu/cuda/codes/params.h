// Parameters of the kernels of a step over codes: the step, and the parts of its work space.
#pragma once

#include <vector_types.h>

#include <cuda_runtime_api.h>

#include "gpu/cuda/codes/codes_kernels.h"

namespace keyhole::gpu::codes {

/// Number of maxima of a block.
inline constexpr uint32_t kBlockMaxima = kCodeBlock / kMaximumRows;
static_assert(kMaximumRows == kPairRows, "a maximum is that of a pair of tiles");

/// Number of maxima that a KV head has room for: one of every 32 rows that a step may read.
[[nodiscard]] __host__ __device__ inline uint32_t most_groups(const CodesStep& s) {
  const uint32_t of_blocks = s.block_capacity * kBlockMaxima;
  return s.lists.list_capacity == 0 ? of_blocks : of_blocks + s.lists.list_capacity;
}

/// Thread blocks of a KV head that choose among its lists: 8, or where that is too few for a device's memory to be
/// busy, and all run at once, 16. See CodesLists::blocks.
inline constexpr uint32_t kListBlocks = 8, kMostListBlocks = 16;

/// What the choice among a KV head's lists has come to.
struct ChosenLists {
  uint32_t pairs = 0;  ///< of tiles that the step reads
  uint32_t is_wide =
      0;  ///< whether a list's logits may spread so far that a row of an unread one may be anything
  /// Whether all blocks are read in place of lists, and no mean stands for any row: then there is no table, and only
  /// `pairs` counts of the others.
  uint32_t reads_all = 0;
  float tops[kMaxDeviceGroup] = {};  ///< largest logit of a mean, base 2
  /// The largest logit that a row of an unread list of each block's may have, base 2, before a soft-cap.
  float reach[kMostListBlocks][kMaxDeviceGroup] = {};
};

struct CodesParams : CodesStep {
  /// Query heads of the kernels, with those that are there to fill tiles: the last part of a step has fewer of its own
  /// than the others.
  uint32_t padded_heads = 0;
  float* maxima =
      nullptr;  ///< largest logit, base 2, of every 32 rows `[kv_heads, most_groups(), padded heads]`
  /// The states of the splits (codes and resident tokens), rotated and not divided: `[kv_heads, splits, group, dim]`,
  /// and (maximum in base 2, sum) `[kv_heads, splits, group]`.
  float* part_o = nullptr;
  float2* part_sum = nullptr;
  float* part_lse = nullptr;  ///< of the codes alone, base 2, `[kv_heads, splits, group]`
  /// A bit for each row, set where a second look at codes has found it: `[kv_heads, parts of the group,
  /// block_capacity * 8]`.
  uint32_t* found = nullptr;

  // Of steps with lists. Scores are the products of queries and mean keys in base 2, before a soft-cap.
  float* list_scores = nullptr;  ///< `[kv_heads, list_capacity, padded heads]`
  /// What all rows of a list that is not read weigh, relative to the head's largest mean logit; 0 of lists that are
  /// read: `[kv_heads, list_capacity, padded heads]`.
  float* list_weights = nullptr;
  uint32_t* list_bins =
      nullptr;  ///< `[kv_heads, list_capacity]` of the choice, of lists that a block does not keep
  ChosenLists* list_ends = nullptr;  ///< `[kv_heads]`
  ListedPair* list_pairs =
      nullptr;  ///< `[kv_heads, groups]` the pairs of tiles that the step reads
  /// With CodesLists::by_memory, what the thread blocks of the choice tell each other: `[kv_heads, lists.blocks]`, a
  /// block's at so many bytes behind the one before.
  std::byte* told = nullptr;
  size_t told_stride = 0;
};

inline constexpr uint32_t kMostSplits = 256;
inline constexpr int kLeastStages = 2, kMostStages = 3;  ///< of CodesStep::stages
/// Number of warps of a thread block of attend_codes(). A warp for 256 components has the registers and the shared
/// memory of two.
template <int kDim>
constexpr int kAttendWarps = kDim <= 128 ? 8 : 4;

/// The kernel that takes up heads in doubt (gpu/cuda/codes/settle.cuh); null: there is none.
struct SettleKernel {
  const void* settle = nullptr;
  uint32_t warps = 0;  ///< of its thread blocks
  size_t shared = 0;   ///< bytes of shared memory, beside those that it declares
};

/// The kernels for steps of several sessions in one launch (gpu/cuda/codes/batch.cuh); null where there are none.
struct BatchKernels {
  const void* attend = nullptr;
  const void* finish = nullptr;
  /// The kernels for families with 8 and with 16 heads of a KV head; groups above 4 have the latter alone.
  const void* family[2] = {};
};

/// The kernels of one shape.
struct Kernels {
  const void* attend = nullptr;  ///< null: the pass is that for many query rows alone
  uint32_t attend_warps = 0;     ///< warps of its thread blocks
  uint32_t attend_heads =
      0;  ///< of a group that a thread block has; others are other blocks' (blockIdx.z)
  int attend_occupancy = 1;  ///< its thread blocks that a multiprocessor has registers for
  size_t attend_fixed = 0;   ///< bytes of shared memory that the kernel declares,
  size_t attend_shared = 0;  ///< and those beside them, at least
  size_t attend_stage = 0;   ///< bytes of one of CodesStep::stages
  const void* attend_lists = nullptr;  ///< in place of `attend`, of steps with lists
  const void* finish = nullptr;        ///< the kernel by a cluster; null where all steps are wide
  const void* finish_parts = nullptr;  ///< the same of all parts of a wide step
  size_t finish_shared = 0;  ///< bytes, beside a float for every 32 rows of a block of the cluster
  size_t settle_shared = 0;  ///< bytes that it takes for heads in doubt, in place of both
  const void* finish_single =
      nullptr;  ///< the kernel by one thread block; null where all steps are wide
  const void* finish_single_parts = nullptr;  ///< the same of all parts of a wide step
  size_t single_shared = 0;                   ///< bytes
  uint32_t heads =
      0;  ///< of a group with those that are there to fill tiles: as many maxima has every 32 rows

  /// The same with fewer heads of a group for a thread block of the pass, from the kernels of so small groups.
  [[nodiscard]] Kernels narrowed(const Kernels& of_few) const {
    Kernels k = *this;
    k.attend = of_few.attend;
    k.attend_lists = of_few.attend_lists;
    k.attend_heads = of_few.attend_heads;
    k.attend_occupancy = of_few.attend_occupancy;
    k.attend_fixed = of_few.attend_fixed;
    k.attend_shared = of_few.attend_shared;
    k.attend_stage = of_few.attend_stage;
    return k;
  }
  /// Number of thread blocks that share a group's heads.
  [[nodiscard]] uint32_t attend_passes(uint32_t group) const {
    return (group + attend_heads - 1) / attend_heads;
  }
};

/// The kernel that chooses among lists (gpu/cuda/codes/list_choice.cuh), and its shared memory in bytes: of all steps,
/// of those with ListShare::miss besides, and of each list that a block keeps; null: there is none.
inline constexpr uint32_t kListWarps = 8;
inline constexpr uint32_t kListThreads = kListWarps * 32;
inline constexpr uint32_t kListTile =
    16;  ///< lists that it scores together; its thread blocks have multiples of it
struct ListKernel {
  const void* choose = nullptr;
  size_t shared = 0, shared_of_more = 0;
  size_t list = 0, list_of_more = 0;  ///< of a list

  /// Bytes, but for the lists that are kept.
  [[nodiscard]] size_t shared_of(const ListShare& share) const {
    return shared + (share.miss > 0.0F ? shared_of_more : 0);
  }
  [[nodiscard]] size_t list_of(const ListShare& share) const {
    return list + (share.miss > 0.0F ? list_of_more : 0);
  }
};
/// blocks: CodesLists::blocks; with kMostListBlocks there are kernels for some dimensions.
[[nodiscard]] ListKernel list_kernel_of(uint32_t dim, uint32_t group, uint32_t blocks);
/// The same where no cluster can, by thread blocks of a KV head that tell each other by the device's memory.
[[nodiscard]] ListKernel list_grid_kernel_of(uint32_t dim, uint32_t group, uint32_t blocks);

[[nodiscard]] SettleKernel settle_kernel_of_2_bits(uint32_t dim);
[[nodiscard]] SettleKernel settle_kernel_of_4_bits(uint32_t dim);

/// The kernels for 64 or 128 components and groups of up to 8.
[[nodiscard]] BatchKernels batch_kernels_of_2_bits(uint32_t dim, uint32_t group);
[[nodiscard]] BatchKernels batch_kernels_of_4_bits(uint32_t dim, uint32_t group);

/// The kernels for so many components and 2 or 4 bits; null kernels for other bits. Each function has its file, so
/// that compilers run side by side.
[[nodiscard]] Kernels kernels_of_64(uint32_t bits, uint32_t group);
[[nodiscard]] Kernels kernels_of_80(uint32_t bits, uint32_t group);
[[nodiscard]] Kernels kernels_of_96(uint32_t bits, uint32_t group);
[[nodiscard]] Kernels kernels_of_128(uint32_t bits, uint32_t group);
[[nodiscard]] Kernels kernels_of_256(uint32_t bits, uint32_t group);
/// Those for all parts of a step alone (gpu/cuda/codes/finish_parts.cuh).
[[nodiscard]] Kernels kernels_of_512(uint32_t bits, uint32_t group);

}  // namespace keyhole::gpu::codes
