#include "tools/engines/llama.cpp/read_back.h"

#include <span>
#include <stdexcept>
#include <string>

namespace keyhole::llama_cpp {

namespace {

/// Rows of cells, or of tokens, that lie side by side.
Rows side_by_side(const CellRows& rows, std::byte* data, uint32_t count) {
  const int64_t head = int64_t{rows.components} * 2;
  return {data, rows.number, count, rows.heads, rows.components, head * rows.heads, head};
}

}  // namespace

void turn_restored(const RestoredRows& restored, Rewriter& rewriter, const CellRows& rows,
                   const ggml_tensor* keys, std::span<const int32_t> by) {
  const auto is_turned = [&](size_t id) { return by[id] != 0 && restored.has(id); };
  for (size_t id = 0; id < by.size() && restored.any();) {
    size_t end = id;
    while (end < by.size() && is_turned(end)) ++end;
    if (end > id) {
      const auto count = static_cast<uint32_t>(end - id);
      rewriter.turn(rows.layer, side_by_side(rows, restored.row(keys, id), count),
                    by.subspan(id, count));
    }
    id = end + 1;
  }
}

void read_back(const Sequences& sequences, Rewriter* rewriter, const CellRows& rows,
               uint32_t stream, uint32_t first, uint32_t count, std::byte* out) {
  const size_t row = size_t{rows.components} * rows.heads * 2;
  for (uint32_t i = 0; i < count;) {
    const auto [sequence, number] = sequences.find(stream, first + i);
    uint32_t n = 1;
    while (i + n < count) {
      const Sequences::Place next = sequences.find(stream, first + i + n);
      if (next.sequence != sequence || next.number != number + n) break;
      ++n;
    }
    if (sequence == nullptr || number + n > sequence->session->tokens(rows.layer)) {
      throw std::runtime_error("the token of cell " + std::to_string(first + i) +
                               " is in no session");
    }
    const Rows wanted = side_by_side(rows, out + i * row, n);
    sequence->session->read(rows.layer, number, rows.values ? Rows{} : wanted,
                            rows.values ? wanted : Rows{});
    if (!rows.values && !sequence->turns.empty()) {
      if (rewriter == nullptr) throw std::runtime_error("keys are to be turned");
      rewriter->turn(rows.layer, wanted, std::span(sequence->turns).subspan(number, n));
    }
    i += n;
  }
}

}  // namespace keyhole::llama_cpp
