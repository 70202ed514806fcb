// The kernels of a neighbour search, for the host code that launches them one after the other. One call of each
// serves one batch of queries and one block of keys.
//
//   sample   scores of every 16th key, group maxima only    -> a first threshold per query
//   search   scores of all keys; what is not below the query's threshold is kept in short lists, one per (query, share
//            of the keys), each cut back to its best `most` when it is full
//   merge    lists of all shares -> the best of the query, sorted; queries with too few are noted, and searched
//            and merged again without a threshold
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cpu/tensor_view.h"

namespace keyhole::gpu {

inline constexpr uint32_t kTileQueries = 256;   ///< of a thread block: 32 for each of its 8 warps
inline constexpr uint32_t kTileKeys = 64;       ///< per step of the pipeline
inline constexpr uint32_t kListCapacity = 256;  ///< entries of a list
inline constexpr uint32_t kListFull =
    kListCapacity - kTileKeys;                ///< more than these: cut back before the next step
inline constexpr uint32_t kSampleEvery = 16;  ///< keys
inline constexpr uint32_t kMostShares = 64;
inline constexpr uint32_t kMostGroups = 512;  ///< of maxima, per query
inline constexpr size_t kMostBlockKeys =
    size_t{kMostGroups / 4} * kTileKeys * kSampleEvery;  // 131072

/// A (score, key) as an integer that grows with the score and, for equal scores, falls with the key.
using Rank = unsigned long long;
inline constexpr Rank kLowestRank =
    0x007FFFFF00000000ULL;  ///< of minus infinity: no score is below it

/// The search of one batch of queries in one block of keys.
struct TileArgs {
  const uint16_t* queries =
      nullptr;  ///< `[rows, width]`, elements as the keys'; f32: three planes, see convert
  const float* query_extra = nullptr;
  const uint32_t* limits = nullptr;        ///< `[rows]` or null
  const uint32_t* chosen = nullptr;        ///< rows to search, or null: all
  const uint32_t* chosen_count = nullptr;  ///< how many, on the device
  uint32_t rows = 0;

  const std::byte* keys = nullptr;  ///< row 0 of the block; rows and their starts 16-byte aligned
  size_t key_stride = 0;            ///< bytes
  const float* key_extra = nullptr;
  uint32_t key_count = 0;
  uint32_t first_key = 0;  ///< number of row 0
  uint32_t dim = 0;

  uint32_t shares = 1;      ///< of the block's keys, see share_keys
  uint32_t share_keys = 0;  ///< a multiple of kTileKeys
  uint32_t most = 0;

  Rank* lists = nullptr;             ///< `[rows, shares, kListCapacity]`
  uint32_t* list_sizes = nullptr;    ///< `[rows, shares]`
  const Rank* thresholds = nullptr;  ///< `[rows]`; ignored with `chosen`

  float* maxima =
      nullptr;  ///< not null: sample; `[rows, groups]` maxima of groups of 16 sampled keys
  uint32_t groups = 0;
};

/// Scores tiles. dim: 64, 80, 96, 128, 256. The pipelines need up to 99 KiB of shared memory, which every device of
/// compute capability 8.0 or newer has.
cudaError_t launch_search_f16(const TileArgs& args, cudaStream_t stream);
cudaError_t launch_search_bf16(const TileArgs& args, cudaStream_t stream);
cudaError_t launch_search_f32(const TileArgs& args, cudaStream_t stream);

/// Sets thresholds[q] to the rank-th largest of the query's maxima.
cudaError_t launch_thresholds(const float* maxima, uint32_t rows, uint32_t groups, uint32_t rank,
                              Rank* thresholds, cudaStream_t stream);

struct MergeArgs {
  const Rank* lists = nullptr;
  const uint32_t* list_sizes = nullptr;
  uint32_t rows = 0, shares = 0, most = 0;
  const uint32_t* chosen = nullptr;  ///< rows to search, or null: all
  const uint32_t* chosen_count = nullptr;
  Rank* best = nullptr;  ///< `[rows, most]` in and out: of earlier blocks, and with this one
  uint32_t* best_sizes = nullptr;  ///< `[rows]` in and out
  bool with_earlier = false;       ///< false: what best holds is not of an earlier block
  Rank* thresholds = nullptr;      ///< out: for the next block of keys
  /// Not null: notes each query whose threshold was an estimate and that has fewer keys than it should: the least of
  /// most, key_count and its limit.
  uint32_t* missed = nullptr;
  uint32_t* missed_count = nullptr;
  unsigned long long* counters = nullptr;  ///< [0]: adds the sizes of lists, [1]: the queries noted
  const uint32_t* limits = nullptr;
  uint32_t key_count = 0;
};
cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream);

/// The input of launch_thin(): keys as in TileArgs, lists as in MergeArgs.
struct ThinArgs {
  const std::byte* keys = nullptr;
  size_t key_stride = 0;
  const float* key_extra = nullptr;  ///< or null
  uint32_t dim = 0;
  DType dtype = DType::f16;  ///< or bf16
  const Rank* best = nullptr;
  const uint32_t* best_sizes = nullptr;
  uint32_t rows = 0, most = 0;  ///< most <= 128
  uint32_t first_query = 0;     ///< row 0 is this key
  uint32_t thin = 0;
  uint32_t* ids = nullptr;  ///< `[rows, thin]`
  uint32_t* counts = nullptr;
};
cudaError_t launch_thin(const ThinArgs& args, cudaStream_t stream);

/// Writes the first `width` of the ranks as ids, scores and counts; scores are multiplied by scales[row] unless it is
/// null.
cudaError_t launch_unpack(const Rank* best, const uint32_t* best_sizes, const float* scales,
                          uint32_t rows, uint32_t most, uint32_t width, uint32_t* ids,
                          float* scores, uint32_t* counts, cudaStream_t stream);

/// Converts rows `[rows, dim]` of any dtype, `stride` bytes apart, to rows of 16-bit operands.
/// To f16, bf16: `[rows, dim]`. Where `scales` is not null, rows of another dtype are scaled by a power of two to less
/// than 1; scales gets the factors that undo it, and extra (in place) is scaled alike.
/// To f32: three bf16 planes whose sum is the number, per 16 elements: `[rows, dim / 16, 3, 16]`.
cudaError_t launch_convert(const TensorView& from, DType to_type, uint16_t* to, float* scales,
                           float* extra, cudaStream_t stream);

}  // namespace keyhole::gpu
