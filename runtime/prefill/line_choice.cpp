#include "runtime/prefill/line_choice.h"

#include <algorithm>
#include <span>

namespace keyhole::runtime {
namespace {

using cpu::kPromptRows;

/// The block from which on all are attended anyhow by a tile whose first query has the position.
uint32_t near_of(uint32_t position, const LineRule& rule) {
  const uint32_t own = position / kPromptRows;
  return own > rule.near_blocks ? own - rule.near_blocks : 0;
}

/// Of [first, end) the `most` with the largest weights, rising.
std::vector<uint32_t> heaviest(const float* weights, uint64_t first, uint32_t end, uint32_t most) {
  std::vector<uint32_t> chosen;
  if (most == 0) return chosen;
  for (uint64_t i = first; i < end; ++i) {
    if (weights[i] > 0.0F) chosen.push_back(static_cast<uint32_t>(i));
  }
  if (most < chosen.size()) {
    std::nth_element(chosen.begin(), chosen.begin() + most, chosen.end(),
                     [&](uint32_t a, uint32_t b) {
                       return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
                     });
    chosen.resize(most);
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.shrink_to_fit();
  return chosen;
}

}  // namespace

HeadLines choose_lines(const cpu::PromptPiece& piece, uint32_t last_tile, const LineRule& rule,
                       const float* columns, const float* slashes) {
  const uint32_t near = near_of(piece.position(last_tile), rule);
  return {
      heaviest(columns, uint64_t{rule.first_blocks} * kPromptRows, near * kPromptRows,
               rule.columns),
      heaviest(slashes, uint64_t{rule.near_blocks} * kPromptRows + 1, piece.rows, rule.slashes)};
}

TileLines list_lines(const cpu::PromptPiece& piece, uint32_t tile, const LineRule& rule,
                     const HeadLines& lines, uint32_t* blocks, uint32_t* rows) {
  const uint32_t begin = tile * cpu::kPromptQueries;
  const uint32_t first = piece.position(begin);
  const uint32_t last = piece.position(std::min(begin + cpu::kPromptQueries, piece.n) - 1);
  const uint32_t end = last / kPromptRows + 1, near = near_of(first, rule);
  std::vector<bool> in(end);
  for (uint32_t b = 0; b < end; ++b) in[b] = b < rule.first_blocks || b >= near;
  for (const uint32_t distance : lines.distances) {
    if (distance > last) break;
    const uint32_t from = first > distance ? (first - distance) / kPromptRows : 0;
    for (uint32_t b = from; b <= (last - distance) / kPromptRows; ++b) in[b] = true;
  }
  TileLines out;
  for (uint32_t b = 0; b < end; ++b) {
    if (in[b]) blocks[out.blocks++] = b;
  }
  for (const uint32_t row : lines.rows) {
    const uint32_t block = row / kPromptRows;
    if (block >= first / kPromptRows) break;
    if (!in[block]) rows[out.rows++] = row;
  }
  return out;
}

}  // namespace keyhole::runtime
