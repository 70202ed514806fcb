// Causal attention of many queries over lists of blocks of rows and of single rows, or over all that they see: exact inside the lists. Tiles of queries
// of some heads that share K and V are spread over the pool; a block of K and V is unpacked once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/aligned.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/row_runs.h"

namespace keyhole::cpu {

/// Queries that share a list of blocks; a block is kPromptRows rows.
inline constexpr uint32_t kPromptQueries = 128;

/// The newest n of `rows` tokens of a prompt.
struct PromptPiece {
  TokenRows q;                   ///< `[n, q_heads, head_dim]`
  RowRuns k, v;                  ///< `[rows, kv_heads, head_dim]`
  TokenRows out;                 ///< `[n, q_heads, head_dim]`, written
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
  /// Blocks [begin, end) that some query of the tile sees.
  struct Span {
    uint32_t begin, end;
  };
  [[nodiscard]] Span seen(uint32_t tile) const;
};

/// Which blocks the queries of each tile attend.
struct PromptLists {
  const uint32_t* counts = nullptr;  ///< `[q_heads, tiles]`; null: all blocks
  /// `[q_heads, tiles, capacity]`, rising, each among those that the tile sees.
  const uint32_t* blocks = nullptr;
  size_t capacity = 0;
  // And rows beside them, in none of a tile's blocks, which all of the tile's queries see: of a piece without window.
  const uint32_t* row_counts = nullptr;  ///< `[q_heads, tiles]`; null: none
  const uint32_t* rows = nullptr;        ///< `[q_heads, tiles, row_capacity]`
  size_t row_capacity = 0;
};

/// Rows in fp32, as products want them: of a block of K, transposed; of V and of queries as they lie.
class RowUnpacker {
 public:
  explicit RowUnpacker(const Kernels& kernels) : kernels_(&kernels) {}
  /// `count` (<= kPromptRows) rows from `first` on to `[dim, kPromptRows]`, columns behind them 0.
  void transpose(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count, uint32_t dim,
                 float* out);
  /// To `[kPromptRows, dim]`, rows behind them 0.
  void copy(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count, uint32_t dim,
            float* out) const;
  /// The same of rows with the given numbers.
  void transpose(const RowRuns& rows, uint32_t head, const uint32_t* numbers, uint32_t count,
                 uint32_t dim, float* out);
  void copy(const RowRuns& rows, uint32_t head, const uint32_t* numbers, uint32_t count,
            uint32_t dim, float* out) const;

 private:
  /// rows_, of which there are kPromptRows, transposed.
  void turn(uint32_t dim, float* out) const;

  const Kernels* kernels_;
  LineVector<float> rows_;
};

/// Keeps its memory between calls, some 1 MiB of each thread; one call at a time.
class BlockAttention {
 public:
  BlockAttention(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  /// Returns when it is done. Sums are fp32, so that products beyond 3e38 and what is not finite give outputs that are not; a
  /// query that sees nothing of its lists, and has no sink, gets 0 and lse -inf. The bits depend on the arguments and the level
  /// of the kernels alone. Throws std::bad_alloc.
  void attend(const PromptPiece& piece, const PromptLists& lists);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> q, o, x, keys, values, largest, sums;
  };
  /// Query heads that a task takes.
  struct Heads {
    uint32_t first, count;
  };
  void attend_tile(const PromptPiece& piece, const PromptLists& lists, uint32_t tile,
                   const Heads& heads, Scratch& scratch) const;
  void attend_block(const PromptPiece& piece, uint32_t block, uint32_t first, uint32_t n,
                    uint32_t head, Scratch& scratch) const;
  void attend_rows(const PromptPiece& piece, const uint32_t* rows, uint32_t count, uint32_t n,
                   uint32_t kv_head, uint32_t head, Scratch& scratch) const;
  /// Of the unpacked keys and values, of which query i sees [from, to): see(i, weigh) says it.
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
