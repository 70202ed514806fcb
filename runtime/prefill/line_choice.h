// Columns and diagonals of a prompt's attention that each query head attends everywhere, on the host: the same choice
// as a device's (gpu/cuda/prefill/line_choice.h), by their weights for the last queries (cpu/line_weights.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/block_attention.h"

namespace keyhole::runtime {

struct LineRule {
  uint32_t columns = 0, slashes = 0;           ///< at most so many
  uint32_t first_blocks = 0, near_blocks = 0;  ///< as of BlockRule: always attended
};

/// Of a head, rising.
struct HeadLines {
  std::vector<uint32_t> rows;       ///< columns
  std::vector<uint32_t> distances;  ///< diagonals
};

/// The heaviest with any weight, of equal ones the first: of the columns behind the first blocks and before the near
/// ones of the tile that begins with query `last_tile`, and of the diagonals behind the near blocks. columns, slashes:
/// `[piece.rows]`.
[[nodiscard]] HeadLines choose_lines(const cpu::PromptPiece& piece, uint32_t last_tile,
                                     const LineRule& rule, const float* columns,
                                     const float* slashes);

struct TileLines {
  uint32_t blocks = 0, rows = 0;  ///< how many of each
};
/// What a tile attends: blocks (the first, the near ones, those that a diagonal crosses), and the columns' rows that
/// lie in none of these and before the block of the tile's first query; both rising, with room for piece.blocks() and
/// lines.rows.size().
[[nodiscard]] TileLines list_lines(const cpu::PromptPiece& piece, uint32_t tile,
                                   const LineRule& rule, const HeadLines& lines, uint32_t* blocks,
                                   uint32_t* rows);

}  // namespace keyhole::runtime
