#include "tools/engines/llama.cpp/placing.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {

Placed place_batch(std::span<const int64_t> ids, size_t streams, const Mask& mask,
                   const Cells& cells, Sequences& sequences, SessionSource& source,
                   Rewriter* rewriter, const std::function<void()>& before_change) {
  const size_t rows = ids.size() / streams;
  const auto stream_of = [&](size_t s) {
    return static_cast<uint32_t>(ids[s * rows] / cells.cells());
  };
  const auto mask_of = [&](size_t s) {
    return mask.data + static_cast<int64_t>(s) * mask.stream_stride;
  };
  sequences.begin_batch(rewriter != nullptr);
  Placed placed;
  std::vector<std::vector<uint32_t>> own(streams);
  for (size_t s = 0; s < streams; ++s) {
    for (size_t i = 0; i < rows; ++i) {
      const int64_t cell = ids[s * rows + i] - int64_t{stream_of(s)} * cells.cells();
      if (cell < 0 || cell >= mask.seen) {
        throw std::runtime_error("row " + std::to_string(s * rows + i) + " fills cell " +
                                 std::to_string(ids[s * rows + i]) +
                                 ", which its stream's mask does not show");
      }
      own[s].push_back(static_cast<uint32_t>(cell));
    }
  }
  std::vector<Sequences::StreamRows> each;
  for (size_t s = 0; s < streams; ++s) each.push_back({stream_of(s), mask_of(s), own[s]});
  if (auto parts = sequences.go_on(each, mask.row_stride, mask.seen)) {
    placed.parts = std::move(*parts);
    return placed;
  }
  if (before_change) before_change();
  std::vector<Batch> batches;
  for (size_t s = 0; s < streams; ++s) {
    batches.push_back(read_batch(mask_of(s), mask.row_stride, mask.seen, own[s]));
    if (batches.back().kind != BatchKind::kRuns) placed.kind = batches.back().kind;
  }
  if (placed.kind != BatchKind::kRuns) return placed;
  for (size_t s = 0; s < streams; ++s) {
    auto parts = sequences.place(stream_of(s), batches[s], own[s], source, rewriter);
    if (!parts) return {BatchKind::kSliding, {}};
    placed.parts.push_back(std::move(*parts));
  }
  return placed;
}

}  // namespace keyhole::llama_cpp
