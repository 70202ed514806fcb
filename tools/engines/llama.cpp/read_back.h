// K and V of cells out of sessions, as llama.cpp's cells would have them: what states are saved from where these are empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tools/engines/llama.cpp/restored_rows.h"
#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

/// Rows of one layer.
struct CellRows {
  uint32_t layer = 0;  // in the engine
  bool values = false;
  Number number = Number::kF16;
  uint32_t heads = 0;
  uint32_t components = 0;
};

/// Writes the rows of `count` cells of a stream from `first` on to `out`, side by side; keys that are to be turned are. Waits for
/// what is enqueued on a session's device. Throws std::runtime_error where a cell's token is in no session, or the library fails.
void read_back(const Sequences& sequences, Rewriter* rewriter, const CellRows& rows,
               uint32_t stream, uint32_t first, uint32_t count, std::byte* out);

/// Calls take(id, count, is_restored) for stretches of the `count` cells from `id` on, which are counted through all streams of
/// `cells` cells: each of one stream, and of cells that all have something in `restored`, or none.
template <class Take>
void read_cells(size_t id, size_t count, uint32_t cells, const RestoredRows& restored,
                const Take& take) {
  for (const size_t end = id + count; id < end;) {
    size_t last = id + 1;
    while (last < end && last % cells != 0 && restored.has(last) == restored.has(id)) ++last;
    take(id, static_cast<uint32_t>(last - id), restored.has(id));
    id = last;
  }
}

/// Turns the restored keys of a layer by a number of positions for each cell, `[all cells]`.
void turn_restored(const RestoredRows& restored, Rewriter& rewriter, const CellRows& rows,
                   const ggml_tensor* keys, std::span<const int32_t> by);

}  // namespace keyhole::llama_cpp
