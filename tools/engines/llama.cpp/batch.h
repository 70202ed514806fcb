// What the mask of a batch says: which tokens go on with which past.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace keyhole::llama_cpp {

/// New tokens that follow one another: they see the same cells that were filled before, and each sees those of the run
/// before itself and itself.
struct Run {
  /// Rows of the batch, rising.
  std::vector<uint32_t> rows;
  /// `[cells]`: 1 where the run sees a cell that this batch did not fill.
  std::vector<uint8_t> past;
  uint32_t past_count = 0;
};

enum class BatchKind {
  /// All rows belong to runs.
  kRuns,
  /// A row does not see all rows that came before it in its run: layers with a sliding window have such masks.
  kSliding,
  /// Something else: trees of drafts, rows that see later ones, a bias in the mask.
  kOther,
};

struct Batch {
  BatchKind kind = BatchKind::kRuns;
  std::vector<Run> runs;
};

/// Reads the mask of one stream. Takes time proportional to rows times cells.
///   mask       row i at mask + i * row_stride, in elements: `[cells]` numbers in fp16, 0 where the row sees the cell,
///              else -infinity
///   new_cells  the cell that each row fills, below `cells`
[[nodiscard]] Batch read_batch(const uint16_t* mask, int64_t row_stride, uint32_t cells,
                               std::span<const uint32_t> new_cells);

/// A row of a mask in which nothing is seen.
[[nodiscard]] std::vector<uint16_t> blind_row(uint32_t cells);

/// Whether the batch is one run whose past is what `past` shows: row i of the mask equals `past` with the new cells of
/// rows 0 to i beside. By up to 16 threads where there is much to compare.
///   past  a row as the mask has them, at least `cells` long; the new cells are not seen in it
[[nodiscard]] bool goes_on(const uint16_t* mask, int64_t row_stride, uint32_t cells,
                           std::span<const uint32_t> new_cells, std::span<const uint16_t> past);

}  // namespace keyhole::llama_cpp
