// Which blocks of rows a tile of a prompt's queries attends, on the host: the same choice as a device's (gpu/prompt.h),
// by the weights that blocks have for some of the queries, or for groups of them.
#pragma once

#include <cstdint>

#include "cpu/block_attention.h"

namespace keyhole::runtime {

/// Weights of a tile's samples (queries or groups of them), overwritten: ln of the sum of e^logit over a block's rows,
/// `[samples, stride]`, the first column that of block 0.
struct TileWeights {
  float* data = nullptr;  ///< null: none, and only what is kept anyhow is attended
  uint32_t samples = 0;
  size_t stride = 0;
};

struct BlockRule {
  uint32_t first_blocks = 0;  ///< of the prompt, always attended
  uint32_t near_blocks = 0;   ///< before that of the tile's first query, with all behind them
  /// Of the weight that the samples have together, the share that the chosen blocks hold at least.
  float mass = 1.0F;
  /// In place of the mass: so many other blocks, with the largest shares of the weight, of equal ones the first. 0: the
  /// mass.
  uint32_t most_blocks = 0;
  /// Blocks that are attended or not together, 1 or 2, by the sum of their shares: from a multiple of it on.
  /// most_blocks counts these.
  uint32_t unit = 1;
};

struct TileChoice {
  uint32_t count = 0;  ///< blocks in the list
  /// Share of the samples' weight that each has in blocks where no other sample has an eighth of it, in units of 2^-40.
  uint64_t looked_up = 0;
};
inline constexpr double kShareUnits =
    1099511627776.0;  // 2^40: sums of shares are the same in any order

/// Writes the tile's list, rising; room for piece.blocks() of them.
[[nodiscard]] TileChoice choose_blocks(const cpu::PromptPiece& piece, uint32_t tile,
                                       const BlockRule& rule, const TileWeights& weights,
                                       uint32_t* list);

}  // namespace keyhole::runtime
