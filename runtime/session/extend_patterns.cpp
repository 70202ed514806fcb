#include "runtime/session/extend_patterns.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/block_attention.h"
#include "cpu/code_layout.h"
#include "runtime/prefill/prefill_pattern.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kFewestByDefault = cpu::kPromptQueries;  // a tile

}  // namespace

void ExtendPatterns::set(const char* pattern, uint32_t tokens) {
  const ModelShape& m = engine_->model();
  if (tokens > kMaxTokens) {
    throw Error(Status::invalid_argument,
                "extends of " + std::to_string(tokens) + " tokens or more, allowed: 1.." +
                    std::to_string(kMaxTokens) + ", and KEYHOLE_AUTO for " +
                    std::to_string(kFewestByDefault));
  }
  std::vector<gpu::PromptPattern> patterns;
  if (pattern != nullptr) {
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      const LayerShape shape = m.of(layer);
      if (shape.value_dim == shape.head_dim) continue;
      throw Error(Status::unsupported,
                  "patterns of extends: value_dim is " + std::to_string(shape.value_dim) +
                      ", needed: head_dim, which is " + std::to_string(shape.head_dim));
    }
    patterns = parse_head_patterns(pattern, m);
  }
  patterns_ = std::move(patterns);
  from_ = tokens;
}

void ExtendPatterns::set_prompt_chunk(uint32_t tokens) {
  if (tokens > kMaxTokens) {
    throw Error(Status::invalid_argument, "prompts in extends of " + std::to_string(tokens) +
                                              " tokens or more, allowed: 1.." +
                                              std::to_string(kMaxTokens) +
                                              ", and KEYHOLE_AUTO (0) for none");
  }
  prompt_chunk_ = tokens;
}

void ExtendPatterns::copy_from(const ExtendPatterns& from) {
  prompt_chunk_ = from.prompt_chunk_;
  patterns_ = from.patterns_;
  from_ = from.from_;
}

bool ExtendPatterns::apply_to(uint32_t layer, const ExtendArgs& args) const {
  const uint32_t fewest = from_ == 0 ? kFewestByDefault : from_;
  return !patterns_.empty() && args.k.tokens >= fewest && args.mask == nullptr &&
         sequence_->layer(layer).offloads() && params_->mode != KEYHOLE_MODE_RESIDENT;
}

std::span<const gpu::PromptPattern> ExtendPatterns::of(uint32_t layer) const {
  const ModelShape& model = engine_->model();
  return std::span(patterns_).subspan(model.first_q_head(layer), model.of(layer).q_heads);
}

uint32_t ExtendPatterns::coded_blocks(uint32_t layer, const ExtendArgs& args, uint32_t rows) const {
  if (!apply_to(layer, args)) return 0;
  const std::span<const gpu::PromptPattern> heads = of(layer);
  const gpu::PromptPattern& first = heads.front();
  const bool alike = std::all_of(heads.begin(), heads.end(),
                                 [&](const gpu::PromptPattern& other) { return other == first; });
  return alike && rows > first.dense_rows ? first.coded_blocks : 0;
}

void ExtendPatterns::add_coded(uint32_t layer, uint32_t n, uint32_t before, uint64_t left_out) {
  constexpr uint32_t kTile = cpu::kPromptQueries, kRows = 64;
  gpu::PromptBlocks blocks;
  uint32_t tiles = 0;
  for (uint32_t first = 0; first < n; first += kTile, ++tiles) {
    const uint64_t rows = uint64_t{before} + std::min(first + kTile, n);
    blocks.seen += (rows + kRows - 1) / kRows * engine_->model().of(layer).q_heads;
  }
  // The last tile counts as the others, however few tokens it has.
  const double of_tiles = static_cast<double>(left_out) * tiles / n * (kCodeBlock / kRows);
  blocks.attended =
      blocks.seen - std::min(blocks.seen, static_cast<uint64_t>(std::llround(of_tiles)));
  add(blocks);
}

uint64_t ExtendPatterns::keys_in(uint32_t layer, uint32_t n,
                                 const gpu::PromptBlocks& blocks) const {
  const uint64_t keys = uint64_t{sequence_->rows(layer)} * engine_->model().of(layer).q_heads * n;
  if (blocks.seen == 0) return keys;
  const double share = static_cast<double>(blocks.attended) / static_cast<double>(blocks.seen);
  return static_cast<uint64_t>(std::llround(static_cast<double>(keys) * share));
}

}  // namespace keyhole::runtime
