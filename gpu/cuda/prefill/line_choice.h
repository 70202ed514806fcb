// Columns and diagonals ("vertical" and "slash" lines) of the attention of a stretch of a prompt, after MInference
// (section 4.2, algorithm 2): the softmax weights of its last queries, up to 64, are added up over each row (a column
// of the attention matrix) and over each distance between query and row (a diagonal), and each query head attends the
// heaviest of both everywhere.
//
// SCHEME
//   weights    of the last queries and all rows: one pass for the logarithm of each query's sum, one for the sums in
//              fp32. The order of each sum is fixed.
//   lines      the largest sums, above 0, of the columns and diagonals that are not attended anyhow: columns behind the
//              first blocks and before the last tile's near ones; diagonals farther back than the near blocks.
//   blocks     a diagonal crosses at most 3 of the blocks of 64 rows for a tile of 128 queries. These, the first and
//              the near blocks are one list of the tile (BlockLists), attended first, as a state.
//   columns    K and V of a head's columns lie gathered, in rising order of their rows, padded with zeros to whole
//              blocks. For each tile a bit says whether it attends a column: where its row lies in none of the tile's
//              blocks (no row counts twice) and before the block of the tile's first query. All queries of the tile
//              see it then, and no query needs to compare positions: rows from that block on are in near blocks,
//              which are in every list. Blocks of 64 columns with a bit set are the tile's second list, which goes on
//              from the state of the first and writes the outputs: both are one softmax.
//
// Each stretch has lines of its own: each chunk of a prompt, and each turn, has the lines of its own last queries.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/prefill/block_choice.h"

namespace keyhole::gpu {

inline constexpr uint32_t kMostLineQueries = 64;
inline constexpr uint32_t kMostColumns = 16384, kMostSlashes = 16384;  ///< of a head
inline constexpr uint32_t kLineRun = 2048;  ///< rows of a thread block's share

/// The line weights of `heads` query heads from `first_head` on. All pointers are the device's.
struct LineWeights {
  uint32_t queries = 0;  ///< the last ones of the piece, 1..kMostLineQueries
  uint32_t first_head = 0, heads = 0;
  /// Largest logits, and sums of weights relative to them, base 2: `[heads, runs of kLineRun rows,
  /// kMostLineQueries]`.
  float2* runs = nullptr;
  float* lse = nullptr;      ///< `[heads, kMostLineQueries]`, of base 2
  float* columns = nullptr;  ///< `[heads, rows]`: sums of the queries' weights
  /// `[2][heads, rows]` sums by the distance of query and row, one of even and one of odd blocks of rows, to be
  /// added.
  float* slashes = nullptr;
  HeadSet wanted;  ///< heads whose weights are computed, among these

  [[nodiscard]] static constexpr uint32_t runs_of(uint32_t rows) {
    return (rows + kLineRun - 1) / kLineRun;
  }
  /// Bytes, for each head, of everything that the pointers point to.
  [[nodiscard]] static constexpr size_t bytes_of_head(uint32_t rows) {
    return (size_t{runs_of(rows)} * sizeof(float2) + sizeof(float)) * kMostLineQueries +
           size_t{3} * rows * sizeof(float);
  }
  /// Sets the pointers into memory of bytes_of_head() for each head, aligned to 256.
  void place(std::byte* memory, uint32_t rows);
};

/// Enqueues the computation of the weights. piece: causal, without window and lists, all queries and rows of the
/// stretch.
void launch_line_weights(const BlockedParams& piece, const LineWeights& weights, DType dtype,
                         uint32_t head_dim, cudaStream_t stream);

/// The chosen lines of query heads, and the rows of the columns.
struct Lines {
  uint32_t columns = 0, slashes = 0;  ///< at most so many of a head
  /// Only columns behind first_blocks and before the near_blocks of the tile that begins with query `last_tile` are
  /// looked at, and only diagonals beyond near_blocks.
  uint32_t first_blocks = 0, near_blocks = 0, last_tile = 0;
  uint32_t capacity = 0;          ///< a multiple of kListRows, columns or more: of all heads
  uint32_t slash_capacity = 0;    ///< of diagonals, likewise
  uint32_t* counts = nullptr;     ///< `[q_heads, 2]`: columns, diagonals
  uint32_t* rows = nullptr;       ///< `[q_heads, capacity]`, rising
  uint32_t* distances = nullptr;  ///< `[q_heads, slash_capacity]`, rising
  void* keys =
      nullptr;  ///< `[q_heads, capacity, head_dim]` of the dtype, zeros behind the columns,
  void* values = nullptr;  ///< aligned to 16 bytes
  HeadSet heads;           ///< heads whose lines are chosen
};
/// Enqueues the choice of the lines for the wanted heads of `weights`.
void launch_choose_lines(const BlockedParams& piece, const LineWeights& weights, const Lines& lines,
                         cudaStream_t stream);
/// Enqueues copies of the rows of the columns.
void launch_gather_columns(const BlockedParams& piece, const Lines& lines, DType dtype,
                           uint32_t head_dim, cudaStream_t stream);

/// The columns that tiles of queries attend, for all heads.
struct ColumnLists {
  uint32_t* counts = nullptr;  ///< as BlockLists has them, of blocks of columns; 0 beforehand
  uint16_t* blocks = nullptr;  ///< `[q_heads, query tiles, capacity / kListRows]`
  uint32_t* chosen = nullptr;  ///< `[q_heads, query tiles, capacity / 32]`: BlockedParams::chosen
};
/// Enqueues the lists of the heads of `lines` for a slice of their stretch. choice: first_blocks, near_blocks,
/// counts, lists, totals (blocks of columns are among those attended), heads and skips are used; its lists have room
/// for `blocks`.
void launch_line_lists(const BlockedParams& slice, const Lines& lines, const ColumnLists& columns,
                       const BlockChoice& choice, uint32_t blocks, cudaStream_t stream);

}  // namespace keyhole::gpu
