// Lists of near rows on the device (index/scan/code_lists.h says what they are, index/scan/list_choice.h how a step chooses
// among them): a step scores the lists' mean keys, reads the lists that weigh by their codes, and takes the others by
// their mean values with the second-order weight of their spread. Rows that no list has yet, the newest ones, are read
// as blocks. The blocks of listed rows stay: a second look at codes in doubt and steps of several tokens read these. Steps of
// sessions with lists are no part of a joint launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/code_layout.h"

namespace keyhole::gpu {

/// Up to how many rows of lists a step reads: a share of the listed rows, `least` at least, and more for heads whose unread lists
/// would hold more than `miss` of their output, by the upper estimate of index/scan/list_choice.h (0: no more).
struct ListShare {
  float share = 0.12F;
  uint32_t least = 8192;
  float miss = 0.0F;
};

/// Listed rows from which on a step may choose among lists. Whether that is faster than reading all blocks depends on their bytes
/// and on the number of KV heads (runtime/plan/list_gain.h).
inline constexpr uint32_t kListsFrom = 32768;

/// The lists of rows [begin, begin + rows) of one KV head, in host memory: the parts of an index::CodeChunk.
struct HeadLists {
  uint32_t lists = 0;
  const uint32_t* ids = nullptr;   ///< `[rows]` the rows of the first list, of the second, ..
  const uint32_t* ends = nullptr;  ///< `[lists]` where each list ends in ids; 1 to kCodeBlock rows
  const size_t* at = nullptr;      ///< `[lists]` where its codes begin in `codes`, in bytes
  const std::byte* means = nullptr;  ///< `[2 (key, value), lists, dim]` fp16
  /// Of each list `[tiles]` key codes, `[tiles]` value codes and `[tiles, 16, 2]` factors, as in cpu/code_layout.h.
  const std::byte* codes = nullptr;
  const float *spreads = nullptr, *noises = nullptr, *widest = nullptr;  ///< `[lists]`
};

/// Where a list lies among the pairs of its KV head.
struct ListPlace {
  uint32_t first_pair = 0;
  uint32_t rows = 0;  ///< 1..256; the rows of its last pair beyond them are zeros
};

/// What choice and weights need to know of a list, beside its means.
struct ListFigures {
  float spread = 0.0F;    ///< mean of |k - mean|^2 / dim
  float widest = 0.0F;    ///< |k - mean|^2 / dim of the longest row, by its code
  float noise = 0.0F;     ///< as that of a block of codes
  float log_rows = 0.0F;  ///< natural logarithm of the rows
};

/// Rows of the pair of tiles that is the unit of lists on the device.
inline constexpr uint32_t kPairRows = 2 * kCodeTile;

/// Bytes of a pair of tiles: keys, values, factors.
[[nodiscard]] constexpr size_t list_pair_bytes(const CodeShape& shape) {
  return size_t{2} * kCodeLanes * 4 * (shape.key_words() + shape.value_words()) + kPairRows * 4;
}

/// Sizes for the lists of a KV head with room for `blocks` blocks of rows.
struct ListSizes {
  uint32_t lists = 0;
  /// Pairs that there is memory for: the rows' own and 5/8 of a pair for each list, or 11 a block, and some. Rows whose lists would need
  /// more stay in blocks.
  uint32_t pairs = 0;
  /// Pairs that a step may have to read, of lists and of blocks.
  uint32_t groups = 0;

  /// list_rows: average rows of a list, as they are clustered.
  constexpr ListSizes(uint32_t blocks, uint32_t list_rows) {
    const uint32_t rows = blocks * kCodeBlock;
    // Clusters of more than 256 rows are divided, and every stretch of rows that is clustered is rounded up.
    lists = (rows / std::max(list_rows, 1U) + 2 * blocks + 64) / 16 * 16;
    pairs = std::max(blocks * 11, blocks * (kCodeBlock / kPairRows) + lists / 8 * 5) + 64;
    groups = blocks * (kCodeBlock / kPairRows) + lists;
  }
};

/// Pairs of tiles that the lists take.
[[nodiscard]] uint32_t pairs_of_lists(const HeadLists& lists);

/// Lists of a KV head as they lie on the device, each part for all of them.
struct PackedLists {
  std::vector<std::byte>
      pairs;                  ///< `[pairs, list_pair_bytes()]` keys, values and factors of 32 rows
  std::vector<uint32_t> ids;  ///< `[pairs, 32]` the rows' numbers; 0 where there is no row
  std::vector<ListPlace> places;     ///< `[lists]`
  std::vector<ListFigures> figures;  ///< `[lists]`
};

/// Packs lists whose first pair is number `first_pair` of the KV head, over what `out` had.
void pack_lists(const CodeShape& shape, const HeadLists& lists, uint32_t first_pair,
                PackedLists& out);

}  // namespace keyhole::gpu
