// Lists of near rows on the device, as kernels find them (gpu/code_lists.h), and the table of what a step reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/code_lists.h"

namespace keyhole::gpu {

/// A pair of tiles, 32 rows, that a step reads by its codes: one of a list's, or of a block of newer rows that no list
/// has.
struct ListedPair {
  static constexpr uint32_t kOfBlock = 1U << 31U;
  static constexpr uint32_t kRowsAt = 26;  ///< the bits below number the list or the block

  uint32_t pair =
      0;  ///< its number among the pairs of the KV head's lists, or among those of its blocks
  uint32_t owner = 0;  ///< kOfBlock or 0, rows - 1, and the number of the list or the block
};

/// Bytes of codes that an H100 reads in the time of a choice by clusters (bench/RESULTS.md, "Lists of codes on a
/// device").
inline constexpr float kChoiceBytesOfH100 = 66e6F;

/// What the steps of a layer that choose among lists tell those behind them (gpu/cuda/codes/list_memory.cuh). Zero at
/// first.
struct ListMemory {
  uint32_t left = 0;  ///< steps that read all blocks before one chooses again
  /// Thread blocks of the choice under way that have arrived, in the highest bits, and what these have come to; 0
  /// between steps.
  alignas(8) unsigned long long sums = 0;
};

/// The lists of a layer as a step finds them, in device memory.
struct CodesLists {
  uint32_t list_capacity = 0;  ///< of a KV head; 0: the step reads all blocks, and has no lists
  uint32_t pair_capacity = 0;  ///< of a KV head
  uint32_t kept =
      0;  ///< lists that a thread block of the choice keeps in shared memory; prepare_codes() sets it
  /// Thread blocks of a KV head that choose, 8 or 16; 0: prepare_codes() decides, and leaves 0 where none can.
  uint32_t blocks = 0;
  /// Whether they tell each other what they know by the device's memory, and not as a cluster. prepare_codes() sets it
  /// where the device has no clusters, or too little shared memory for them.
  bool by_memory = false;
  /// Bytes of codes that take as long to read as the choice; prepare_codes() sets them by the device's memory. That a
  /// choice by memory takes a half longer is neglected.
  float choice_bytes = kChoiceBytesOfH100;
  ListShare share;
  const uint32_t* listed = nullptr;       ///< one number: the first blocks whose rows are in lists
  const uint32_t* counts = nullptr;       ///< `[kv_heads]` lists
  const std::byte* pairs = nullptr;       ///< `[kv_heads, pair_capacity]` TilePair
  const uint32_t* ids = nullptr;          ///< `[kv_heads, pair_capacity, 32]` the rows' numbers
  const ListPlace* places = nullptr;      ///< `[kv_heads, list_capacity]`
  const ListFigures* figures = nullptr;   ///< `[kv_heads, list_capacity]`
  const uint16_t* key_means = nullptr;    ///< `[kv_heads, list_capacity, dim]` fp16
  const uint16_t* value_means = nullptr;  ///< likewise
  /// The same as tensor cores take them, in tiles of 16 lists: `[kv_heads, tiles, dim / 16, 32 lanes, 4]`, see
  /// MeanTiles.
  const uint32_t* mean_tiles = nullptr;
  ListMemory* memory = nullptr;  ///< null: each step chooses
  /// With by_memory, `[kv_heads]` counters of the thread blocks that have arrived at a barrier, zero at first.
  uint32_t* arrivals = nullptr;
};

/// Mean values of a KV head's lists that are to be laid out as tensor cores take them: register 4 m + a of lane l
/// holds, for j = 0, 1, component 16 m + l / 4 + 8 (a mod 2) of list 2 (l mod 4) + j + 8 (a div 2) of the tile, in the
/// unit that the value codes of such components have in the pass (ValueUnits of gpu/cuda/codes/value_sums.cuh),
/// relative to the largest.
struct MeanTiles {
  static constexpr uint32_t kLists = 16;  ///< of a tile

  uint32_t dim = 0, bits = 0;
  const uint16_t* means = nullptr;  ///< `[lists, dim]` fp16
  uint32_t first = 0, end = 0;      ///< lists; all tiles that have one of them are written
  uint32_t* tiles = nullptr;        ///< `[tiles, dim / 16, 32, 4]`
};
[[nodiscard]] constexpr size_t mean_tiles_of(size_t lists) {
  return (lists + MeanTiles::kLists - 1) / MeanTiles::kLists;
}

}  // namespace keyhole::gpu
