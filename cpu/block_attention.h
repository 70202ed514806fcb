// Causal attention of many queries, either over all rows that they see or over lists of blocks and of single rows
// (block-sparse attention), exact inside the lists. Tiles of queries, for some heads that share K and V, are spread
// over the pool; a block of K and V is unpacked once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/aligned.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/row_runs.h"
#include "cpu/tensor_view.h"

namespace keyhole::cpu {

/// Queries that share a list of blocks; a block is kPromptRows rows.
inline constexpr uint32_t kPromptQueries = 128;

/// A piece of a prompt to attend: its queries are those of the newest n of `rows` tokens.
struct PromptPiece {
  TensorView q;                  ///< `[n, q_heads, head_dim]`
  RowRuns k, v;                  ///< `[rows, kv_heads, head_dim]`
  TensorOut out;                 ///< `[n, q_heads, head_dim]`, written
  float* lse = nullptr;          ///< `[n, q_heads]`, natural log, written; null: not wanted
  const float* sinks = nullptr;  ///< learned, `[q_heads]`, natural log; null: none
  uint32_t n = 0, rows = 0;      ///< n <= rows
  uint32_t q_heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t window = 0;  ///< a query sees so many rows, its own the newest; 0: all up to its own
  LogitParams logits;

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] uint32_t position(uint32_t query) const { return rows - n + query; }
  [[nodiscard]] uint32_t tiles() const { return (n + kPromptQueries - 1) / kPromptQueries; }
  [[nodiscard]] uint32_t blocks() const { return (rows + kPromptRows - 1) / kPromptRows; }
  /// The blocks [begin, end) that some query of a tile sees.
  struct Span {
    uint32_t begin, end;
  };
  [[nodiscard]] Span seen(uint32_t tile) const;
};

/// The blocks and single rows that the queries of each tile attend.
struct PromptLists {
  const uint32_t* counts = nullptr;  ///< `[q_heads, tiles]`; null: all blocks
  /// `[q_heads, tiles, capacity]` block numbers, rising; a tile sees each block of its list.
  const uint32_t* blocks = nullptr;
  size_t capacity = 0;
  // Single rows beside the blocks, in none of the tile's blocks and seen by all of its queries. Only for a piece
  // without window.
  const uint32_t* row_counts = nullptr;  ///< `[q_heads, tiles]`; null: none
  const uint32_t* rows = nullptr;        ///< `[q_heads, tiles, row_capacity]`
  size_t row_capacity = 0;
};

/// Unpacks rows to fp32 in the order that products want: a block of K transposed, V and queries as they lie.
class RowUnpacker {
 public:
  explicit RowUnpacker(const Kernels& kernels) : kernels_(&kernels) {}
  /// Writes `count` (<= kPromptRows) rows from `first` on to out `[dim, kPromptRows]`; the columns behind them are 0.
  void transpose(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count, uint32_t dim,
                 float* out);
  /// Writes `count` rows from `first` on to out `[kPromptRows, dim]`; the rows behind them are 0.
  void copy(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count, uint32_t dim,
            float* out) const;
  /// transpose() of the rows with the given numbers instead of consecutive ones.
  void transpose(const RowRuns& rows, uint32_t head, const uint32_t* numbers, uint32_t count,
                 uint32_t dim, float* out);
  void copy(const RowRuns& rows, uint32_t head, const uint32_t* numbers, uint32_t count,
            uint32_t dim, float* out) const;

 private:
  /// Transposes rows_, which has kPromptRows rows, into `out`.
  void turn(uint32_t dim, float* out) const;

  const Kernels* kernels_;
  LineVector<float> rows_;
};

/// Runs such attention on a pool. Keeps its memory between calls, some 1 MiB for each thread; one call at a time.
class BlockAttention {
 public:
  BlockAttention(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  /// Attends `piece` over `lists` and returns when it is done. Sums are fp32: inputs that are not finite, or products
  /// beyond 3e38, give outputs that are not finite. A query that sees nothing of its lists and has no sink gets o = 0
  /// and lse = -inf. The bits depend on the arguments and the level of the kernels alone. Throws std::bad_alloc.
  void attend(const PromptPiece& piece, const PromptLists& lists);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> q, o, x, keys, values, largest, sums;
  };
  /// The query heads that one task takes.
  struct Heads {
    uint32_t first, count;
  };
  void attend_tile(const PromptPiece& piece, const PromptLists& lists, uint32_t tile,
                   const Heads& heads, Scratch& scratch) const;
  void attend_block(const PromptPiece& piece, uint32_t block, uint32_t first, uint32_t n,
                    uint32_t head, Scratch& scratch) const;
  void attend_rows(const PromptPiece& piece, const uint32_t* rows, uint32_t count, uint32_t n,
                   uint32_t kv_head, uint32_t head, Scratch& scratch) const;
  /// Attends the unpacked keys and values. see(i, weigh) calls weigh(from, to) for query i, which sees rows [from,
  /// to).
  template <class See>
  void attend_keys(const PromptPiece& piece, uint32_t n, uint32_t head, Scratch& scratch,
                   See&& see) const;
  void finish(const PromptPiece& piece, uint32_t first, uint32_t n, const Heads& heads,
              Scratch& scratch) const;

  const Kernels* kernels_;
  Pool* pool_;
  std::vector<Scratch> scratch_;
};

}  // namespace keyhole::cpu
