#include "tools/engines/llama.cpp/read_back.h"

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

void forget_taken(const Sequences& sequences, const Cells& cells, std::span<const uint32_t> layers,
                  RestoredRows& restored) {
  for (const auto& sequence : sequences.all()) {
    if (!sequence->is_refilled) continue;
    const auto has_all = [&](uint32_t layer) {
      return sequence->session->tokens(layer) == sequence->tokens.size();
    };
    if (!std::all_of(layers.begin(), layers.end(), has_all)) continue;
    for (const Token& token : sequence->tokens) {
      if (!cells.holds(sequence->stream, token)) continue;  // restored since
      restored.forget(size_t{sequence->stream} * cells.cells() + token.cell);
    }
    sequence->is_refilled = false;
  }
}

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

void read_tensor(const Sequences& sequences, Rewriter* rewriter, const RestoredRows& restored,
                 const CellRows& rows, const ggml_tensor* tensor, uint32_t cells, size_t offset,
                 size_t bytes, std::byte* out) {
  const size_t row = tensor->nb[1];
  if (offset % row != 0 || bytes % row != 0) throw std::runtime_error("not whole rows");
  for (size_t id = offset / row, end = id + bytes / row; id < end;) {
    // A stretch of one stream, of which all cells have something restored, or none.
    const bool is_restored = restored.has(id);
    size_t last = id + 1;
    while (last < end && last % cells != 0 && restored.has(last) == is_restored) ++last;
    const auto count = static_cast<uint32_t>(last - id);
    std::byte* const to = out + (id * row - offset);
    if (is_restored) {
      std::memcpy(to, restored.row(tensor, id), count * row);
    } else {
      read_back(sequences, rewriter, rows, static_cast<uint32_t>(id / cells),
                static_cast<uint32_t>(id % cells), count, to);
    }
    id = last;
  }
}

void read_out(const Sequences& sequences, Rewriter* rewriter, const CellRows& rows,
              const ggml_tensor* tensor, uint32_t cells, uint32_t stream, uint32_t first,
              uint32_t count, RestoredRows& restored) {
  const size_t row = tensor->nb[1];
  const size_t id = size_t{stream} * cells + first;
  std::byte* const to = restored.write(tensor, id * row, count * row);
  try {
    read_back(sequences, rewriter, rows, stream, first, count, to);
  } catch (...) {
    for (size_t i = id; i < id + count; ++i) restored.forget(i);
    throw;
  }
}

}  // namespace keyhole::llama_cpp
