// Lists of near rows on the device (index/scan/code_lists.h says what they are, index/scan/list_choice.h how a step
// chooses among them): a step scores the lists' mean keys, reads the lists that weigh by their codes, and takes the
// others by their mean values with the second-order weight of their spread. Rows that no list has yet, the newest ones,
// are read as blocks. The blocks of listed rows stay: a second look at codes in doubt, steps with more than 16 rows of
// queries for a KV head and those of several sessions in one launch read these, and steps whose heads look at
// everything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"

namespace keyhole::gpu {

/// Up to how many rows of lists a step reads: a share of the listed rows, `least` at least, and more for heads whose
/// unread lists would hold more than `miss` of their output, by the upper estimate of index/scan/list_choice.h (0: no
/// more).
///
/// Where heads look at everything, all blocks are faster than lists. A KV head that would read more than the share
/// `most` of the listed rows reads them in this step. Where lists have taken a layer's step longer than all blocks
/// would, its next `keeps` steps read these without choosing, and then one chooses again. So a step's result depends on
/// those before it; the steps of a copy, of a loaded session, and those behind a change of lists begin with one that
/// chooses.
struct ListShare {
  float share = 0.12F;
  uint32_t least = 8192;
  float miss = 0.0F;
  float most = 0.9F;
  uint32_t keeps = 31;
};

/// Listed rows from which on a step may choose among lists. Whether that is faster than reading all blocks depends on
/// their bytes and on the number of KV heads (runtime/plan/list_gain.h).
inline constexpr uint32_t kListsFrom = 32768;

/// Fewer rows than that a list does not have on average.
inline constexpr uint32_t kFewestListRows = 16;

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
  /// Pairs that there is memory for: the rows' own and 5/8 of a pair for each list, or 11 a block, and some. Rows whose
  /// clusters would need more are cut into even lists (ListStretch).
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

/// The most rows that are clustered together: they take as long as their number squared, and the error does not fall
/// with it.
inline constexpr uint32_t kListStretch = 16384;

/// What the lists of rows that are clustered together have at most, of a KV head: the sum over all stretches is no more
/// than ListSizes.
struct ListStretch {
  uint32_t clusters = 0;
  uint32_t lists = 0;
  uint32_t pairs = 0;
  uint32_t even_rows = 0;  ///< of a list, where the clusters' own lists would take more pairs

  /// rows: a multiple of kCodeBlock; list_rows as of ListSizes.
  constexpr ListStretch(uint32_t rows, uint32_t list_rows) {
    const uint32_t each = std::max(list_rows, kFewestListRows), blocks = rows / kCodeBlock;
    clusters = std::max((rows + each / 2) / each, 1U);
    lists = rows / each + 2 * blocks;
    pairs = std::max(blocks * 11, blocks * (kCodeBlock / kPairRows) + lists / 8 * 5);
    even_rows = (each + kPairRows - 1) / kPairRows * kPairRows;
  }
  constexpr ListStretch() = default;
};

}  // namespace keyhole::gpu
