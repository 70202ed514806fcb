// The quick way of most batches: each of their sequences goes on with all that it has.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/engines/llama.cpp/sequences.h"

namespace keyhole::llama_cpp {

/// Makes the sequence's `sight` anew.
void Sequences::look(Sequence& sequence) const {
  sequence.sight = blind_row(cells_.cells());
  sequence.sight_end = 0;
  for (const Token& token : sequence.tokens) {
    sequence.sight[token.cell] = 0;
    sequence.sight_end = std::max(sequence.sight_end, token.cell + 1);
  }
  sequence.sighted = cells_.changes();
}

/// Whether rows of a stream that follow one another go on with all tokens of the sequence, as far as is known without a
/// look at the cells.
bool Sequences::goes_on_with(const Sequence& sequence, const StreamRows& rows, int64_t row_stride,
                             uint32_t seen, size_t written) const {
  if (sequence.stream != rows.stream || sequence.batch == batch_ || sequence.sight.empty() ||
      sequence.tokens.empty() || sequence.sighted + written != cells_.changes()) {
    return false;
  }
  const auto is_new = [&](uint32_t cell) { return sequence.sight[cell] != 0; };
  return sequence.sight_end <= seen && rows.mask[sequence.tokens.back().cell] == 0 &&
         std::all_of(rows.new_cells.begin(), rows.new_cells.end(), is_new) &&
         goes_on(rows.mask, row_stride, seen, rows.new_cells, sequence.sight);
}

std::optional<std::vector<std::vector<Part>>> Sequences::go_on(std::span<const StreamRows> streams,
                                                               int64_t row_stride, uint32_t seen) {
  size_t written = 0;
  for (const StreamRows& rows : streams) written += rows.new_cells.size();
  // All is looked at before anything is changed.
  std::vector<std::vector<Part>> parts;
  std::vector<const Sequence*> taken;
  for (const StreamRows& rows : streams) {
    parts.emplace_back();
    const std::span<const uint32_t> cells = rows.new_cells;
    for (size_t first = 0; first < cells.size();) {
      // Tokens of one sequence lie side by side, and each sees the one before.
      size_t end = first + 1;
      while (end < cells.size() &&
             rows.mask[static_cast<int64_t>(end) * row_stride + cells[end - 1]] == 0) {
        ++end;
      }
      const StreamRows own{rows.stream, rows.mask + static_cast<int64_t>(first) * row_stride,
                           cells.subspan(first, end - first)};
      const auto found = std::find_if(sequences_.begin(), sequences_.end(), [&](const auto& each) {
        return goes_on_with(*each, own, row_stride, seen, written);
      });
      if (found == sequences_.end()) return std::nullopt;
      Sequence* sequence = found->get();
      // Two go on with the same tokens, of which one is a copy.
      if (std::find(taken.begin(), taken.end(), sequence) != taken.end()) return std::nullopt;
      taken.push_back(sequence);
      Part part{sequence, static_cast<uint32_t>(sequence->tokens.size()), rows.stream, {}};
      for (; first < end; ++first) part.rows.push_back(static_cast<uint32_t>(first));
      parts.back().push_back(std::move(part));
    }
  }
  for (size_t s = 0; s < streams.size(); ++s) {
    for (const Part& part : parts[s]) {
      Sequence& sequence = *part.sequence;
      for (const uint32_t row : part.rows) {
        const uint32_t cell = streams[s].new_cells[row];
        sequence.tokens.push_back({cell, cells_.stamp(part.stream, cell)});
        sequence.sight[cell] = 0;
        sequence.sight_end = std::max(sequence.sight_end, cell + 1);
      }
      sequence.sighted = cells_.changes();
      sequence.batch = batch_;
      sequence.is_left = sequence.slid = sequence.is_passed_over = false;
    }
  }
  for (const StreamRows& rows : streams) drop_useless(rows.stream, rows.new_cells);
  return parts;
}

}  // namespace keyhole::llama_cpp
