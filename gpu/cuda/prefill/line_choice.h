// Columns and diagonals ("vertical" and "slash" lines) of the attention of a stretch of a prompt, after MInference (section 4.2,
// algorithm 2): the softmax weights of its last queries, up to 64, are added up over each row (a column of the attention matrix) and over
// each distance between query and row (a diagonal), and each query head attends the heaviest of both everywhere.
//
// SCHEME
//   weights    of the last queries and all rows: a pass for the logarithm of each query's sum, a pass for the sums in fp32. No sum is
//              added up in an order that depends on chance.
//   lines      the largest sums with any weight, of those columns and diagonals that are not attended anyhow: of the columns, those
//              behind the first blocks and before the last tile's near ones; of the diagonals, those farther back than the near blocks.
//   blocks     of a tile of 128 queries and a diagonal: the blocks of 64 rows that it crosses, at most 3, beside the first and the near
//              ones. All of a tile's blocks are one list (BlockLists), attended first, as a state.
//   columns    K and V of a head's columns lie gathered, in rising order of their rows, padded with zeros to whole blocks. For each tile a
//              bit says whether it attends a column: where its row lies in none of the tile's blocks (no row counts twice) and
//              before the block of the tile's first query. All queries of the tile see it then, and no query needs to compare
//              positions: rows from that block on are in near blocks, which are in every list. Blocks of 64 columns with a bit set are
//              the tile's second list, which goes on from the state of the first and writes the outputs: both are one softmax.
//
// A stretch's lines are its own: chunks of a prompt, and turns, have each the lines of their own last queries.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/prefill/block_choice.h"

namespace keyhole::gpu {

inline constexpr uint32_t kMostLineQueries = 64;
inline constexpr uint32_t kMostColumns = 16384, kMostSlashes = 16384;  ///< of a head
inline constexpr uint32_t kLineRun = 2048;  ///< rows of a thread block's share

/// Of `heads` query heads from `first_head` on. All pointers are the device's.
struct LineWeights {
  uint32_t queries = 0;  ///< the last ones of the piece, 1..kMostLineQueries
  uint32_t first_head = 0, heads = 0;
  /// Largest logits and sums of weights relative to it, of base 2, `[heads, runs of kLineRun rows, kMostLineQueries]`.
  float2* runs = nullptr;
  float* lse = nullptr;      ///< `[heads, kMostLineQueries]`, of base 2
  float* columns = nullptr;  ///< `[heads, rows]`: sums of the queries' weights
  /// `[2][heads, rows]` by the distance of query and row: of even and of odd blocks of rows, to be added.
  float* slashes = nullptr;
  HeadSet wanted;  ///< of these heads, whose weights are computed

  [[nodiscard]] static constexpr uint32_t runs_of(uint32_t rows) {
    return (rows + kLineRun - 1) / kLineRun;
  }
  /// Of all that the pointers point to, for each head.
  [[nodiscard]] static constexpr size_t bytes_of_head(uint32_t rows) {
    return (size_t{runs_of(rows)} * sizeof(float2) + sizeof(float)) * kMostLineQueries +
           size_t{3} * rows * sizeof(float);
  }
  /// Where they lie in memory of so many bytes for each head, aligned to 256.
  void place(std::byte* memory, uint32_t rows);
};

/// Enqueues their computation. piece: causal, without window and lists, all queries and rows of the stretch.
void launch_line_weights(const BlockedParams& piece, const LineWeights& weights, DType dtype,
                         uint32_t head_dim, cudaStream_t stream);

/// The lines of query heads, and their rows.
struct Lines {
  uint32_t columns = 0, slashes = 0;  ///< at most so many of a head
  /// Columns and diagonals that are not looked at: behind first_blocks, before near_blocks of the tile that begins with query `last_tile`.
  uint32_t first_blocks = 0, near_blocks = 0, last_tile = 0;
  uint32_t capacity = 0;          ///< a multiple of kListRows, columns or more: of all heads
  uint32_t slash_capacity = 0;    ///< likewise
  uint32_t* counts = nullptr;     ///< `[q_heads, 2]`: columns, diagonals
  uint32_t* rows = nullptr;       ///< `[q_heads, capacity]`, rising
  uint32_t* distances = nullptr;  ///< `[q_heads, slash_capacity]`, rising
  void* keys =
      nullptr;  ///< `[q_heads, capacity, head_dim]` of the dtype, zeros behind the columns,
  void* values = nullptr;  ///< aligned to 16 bytes
  HeadSet heads;           ///< whose lines are chosen
};
/// Enqueues the choice of the lines of weights.heads' wanted ones.
void launch_choose_lines(const BlockedParams& piece, const LineWeights& weights, const Lines& lines,
                         cudaStream_t stream);
/// Enqueues copies of the columns' rows.
void launch_gather_columns(const BlockedParams& piece, const Lines& lines, DType dtype,
                           uint32_t head_dim, cudaStream_t stream);

/// What tiles of queries attend of the columns, of all heads.
struct ColumnLists {
  uint32_t* counts = nullptr;  ///< as BlockLists has them, of blocks of columns; 0 beforehand
  uint16_t* blocks = nullptr;  ///< `[q_heads, query tiles, capacity / kListRows]`
  uint32_t* chosen = nullptr;  ///< `[q_heads, query tiles, capacity / 32]`: BlockedParams::chosen
};
/// Enqueues the lists of the heads of `lines`, of slices of the stretch that the lines are of. choice: first_blocks, near_blocks,
/// counts, lists, totals (blocks of columns are among those attended), heads, skips; its lists have room for `blocks`.
void launch_line_lists(const BlockedParams& slice, const Lines& lines, const ColumnLists& columns,
                       const BlockChoice& choice, uint32_t blocks, cudaStream_t stream);

}  // namespace keyhole::gpu
