// From the numbers and the mask of a batch to the sequences that its tokens go on with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/engines/llama.cpp/batch.h"
#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

/// The mask of a batch in host memory: for each stream and row of it `[seen]` numbers in fp16, see read_batch().
/// Strides are in elements.
struct Mask {
  const uint16_t* data = nullptr;
  int64_t row_stride = 0;
  /// From a stream's mask to the next one's; 0: all have the same.
  int64_t stream_stride = 0;
  uint32_t seen = 0;
};

struct Placed {
  /// kRuns: `parts` has, for each stream of the batch, its runs and their sequences. kSliding, kOther: it is empty.
  BatchKind kind = BatchKind::kRuns;
  std::vector<std::vector<Part>> parts;
};

/// Places a batch whose cells have been written (Cells::write()): the rows of one stream after those of another, as
/// many of each. Begins a batch of the sequences. Their lists have the new tokens then, see Sequences::place(). Throws
/// std::runtime_error for a cell that the mask does not show, and what Sequences::place() throws.
///   ids      the cell of each row, counted through all streams
///   streams  how many streams the batch has rows of
///   rewriter as for Sequences::place()
///   before_change  called, where a batch does not simply go on with a sequence, before any other sequence is looked at
///                  or changed; null: nothing
[[nodiscard]] Placed place_batch(std::span<const int64_t> ids, size_t streams, const Mask& mask,
                                 const Cells& cells, Sequences& sequences, SessionSource& source,
                                 Rewriter* rewriter,
                                 const std::function<void()>& before_change = {});

}  // namespace keyhole::llama_cpp
