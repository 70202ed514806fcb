// Lists of near rows on the device, as kernels find them (gpu/code_lists.h), and the table of what a step reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/code_lists.h"

namespace keyhole::gpu {

/// A pair of tiles, 32 rows, that a step reads by its codes: one of a list's, or of a block of newer rows that no list has.
struct ListedPair {
  static constexpr uint32_t kOfBlock = 1U << 31U;
  static constexpr uint32_t kRowsAt = 26;  ///< the bits below number the list or the block

  uint32_t pair =
      0;  ///< its number among the pairs of the KV head's lists, or among those of its blocks
  uint32_t owner = 0;  ///< kOfBlock or 0, rows - 1, and the number of the list or the block
};

/// The lists of a layer as a step finds them, in device memory.
struct CodesLists {
  uint32_t list_capacity = 0;  ///< of a KV head; 0: the step reads all blocks, and has no lists
  uint32_t pair_capacity = 0;  ///< of a KV head
  ListShare share;
  uint32_t score_blocks = 0;  ///< thread blocks of a KV head that score lists
  uint32_t mean_splits = 0;   ///< of CodesStep::splits, those that attend lists by their means
  const uint32_t* listed = nullptr;       ///< one number: the first blocks whose rows are in lists
  const uint32_t* counts = nullptr;       ///< `[kv_heads]` lists
  const std::byte* pairs = nullptr;       ///< `[kv_heads, pair_capacity]` TilePair
  const uint32_t* ids = nullptr;          ///< `[kv_heads, pair_capacity, 32]` the rows' numbers
  const ListPlace* places = nullptr;      ///< `[kv_heads, list_capacity]`
  const ListFigures* figures = nullptr;   ///< `[kv_heads, list_capacity]`
  const uint16_t* key_means = nullptr;    ///< `[kv_heads, list_capacity, dim]` fp16
  const uint16_t* value_means = nullptr;  ///< likewise
  uint32_t* arrivals = nullptr;           ///< `[kv_heads]`, zero between launches
};

}  // namespace keyhole::gpu
