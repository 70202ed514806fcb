// K and V of cells out of sessions, as llama.cpp's cells would have them: what states are saved from where these are
// empty.
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

/// Writes the rows of `count` cells of a stream from `first` on to `out`, side by side; keys that are to be turned are.
/// Waits for what is enqueued on a session's device. Throws std::runtime_error where a cell's token is in no session,
/// or the library fails.
void read_back(const Sequences& sequences, Rewriter* rewriter, const CellRows& rows,
               uint32_t stream, uint32_t first, uint32_t count, std::byte* out);

/// Writes `bytes` of a tensor from `offset` on to `out`: whole rows of cells, which are counted through all streams of
/// `cells` cells. What was restored comes from `restored`, all else by read_back(). Throws std::runtime_error as that
/// does.
void read_tensor(const Sequences& sequences, Rewriter* rewriter, const RestoredRows& restored,
                 const CellRows& rows, const ggml_tensor* tensor, uint32_t cells, size_t offset,
                 size_t bytes, std::byte* out);

/// read_back() into `restored`, where sessions find the cells' tokens. tensor: of the cache, whose rows they are;
/// cells: of each stream. Throws as read_back() does; nothing of the cells is in `restored` then.
void read_out(const Sequences& sequences, Rewriter* rewriter, const CellRows& rows,
              const ggml_tensor* tensor, uint32_t cells, uint32_t stream, uint32_t first,
              uint32_t count, RestoredRows& restored);

/// Forgets what was restored and sequences have taken into their sessions, in all of the engine's layers `layers`.
void forget_taken(const Sequences& sequences, const Cells& cells, std::span<const uint32_t> layers,
                  RestoredRows& restored);

/// Turns the restored keys of a layer by a number of positions for each cell, `[all cells]`.
void turn_restored(const RestoredRows& restored, Rewriter& rewriter, const CellRows& rows,
                   const ggml_tensor* keys, std::span<const int32_t> by);

}  // namespace keyhole::llama_cpp
