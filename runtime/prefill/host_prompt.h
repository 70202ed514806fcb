// Attention of a prompt where there is no GPU: K and V in host memory, attended by the worker pool.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/block_attention.h"
#include "cpu/block_weights.h"
#include "cpu/group_weights.h"
#include "cpu/line_weights.h"
#include "gpu/prompt.h"
#include "runtime/prefill/line_choice.h"

namespace keyhole::runtime {

/// As gpu::PromptAttention says, but that all pointers of a stretch are the host's, in f32, f16 or bf16 each, at any
/// address and with any strides, that streams are not looked at, and that a call returns when it is done.
class HostPrompt final : public gpu::PromptAttention {
 public:
  /// Head dimensions: all that the host has (is_supported_head_dim).
  HostPrompt(const gpu::PromptShape& shape, const cpu::Kernels& kernels, cpu::Pool& pool);

  using gpu::PromptAttention::attend;
  void attend(const gpu::PromptStretch& stretch, std::span<const gpu::PromptPattern> patterns,
              gpu::Stream stream) override;
  /// The same of a piece whose K and V may lie in several places, in int8 too.
  void attend(const cpu::PromptPiece& piece, std::span<const gpu::PromptPattern> patterns);
  [[nodiscard]] gpu::PromptBlocks blocks() const override { return totals_; }
  [[nodiscard]] size_t bytes() const override;
  /// About what bytes() is after the piece, where it was no more before.
  [[nodiscard]] size_t bytes_for(const cpu::PromptPiece& piece,
                                 std::span<const gpu::PromptPattern> patterns) const;

 private:
  /// Query heads of one pattern.
  struct Heads {
    const gpu::PromptPattern* pattern;  ///< null: dense
    std::vector<uint32_t> heads;
  };
  struct Plan {
    std::vector<Heads> groups;
    uint32_t samples = 0;  ///< of a tile, at most
    uint32_t columns = 0;  ///< of a head, likewise
    bool has_lines = false;
    uint32_t tiles = 0;  ///< of a slice; 0: all heads are dense
  };
  /// Throws Error(invalid_argument). patterns outlive it.
  [[nodiscard]] Plan plan(const cpu::PromptPiece& piece,
                          std::span<const gpu::PromptPattern> patterns) const;
  [[nodiscard]] cpu::PromptPiece piece_of(const gpu::PromptStretch& stretch) const;
  /// The lines of the heads that attend by them; the stretch's last slice ends with the tile that begins with query
  /// `last_tile`.
  void find_lines(const cpu::PromptPiece& piece, uint32_t last_tile, std::span<const Heads> groups);
  void attend_slice(cpu::PromptPiece piece, uint32_t begin, uint32_t n,
                    std::span<const Heads> groups);
  void choose(const cpu::PromptPiece& piece, const Heads& group);
  void choose_lines_of(const cpu::PromptPiece& piece, const Heads& group);
  /// To weights_, of one query or group of queries in so many; 0: of none.
  uint32_t weigh(const cpu::PromptPiece& piece, const Heads& group);

  gpu::PromptShape shape_;
  cpu::Pool* pool_;
  cpu::BlockAttention attention_;
  cpu::BlockWeights samples_;
  cpu::GroupWeights groups_;
  cpu::LineWeights line_weights_;
  gpu::PromptBlocks totals_;
  // Of a slice: weights `[heads, samples, blocks]` of the heads of one pattern (before that, of a stretch, sums over
  // columns and then diagonals, `[2][heads, rows]`), lists of all heads.
  std::vector<float> weights_;
  std::vector<uint32_t> counts_, lists_;
  std::vector<uint64_t> looked_up_;  ///< `[heads, tiles]`
  std::vector<HeadLines> lines_;     ///< of a stretch `[q_heads]`
  /// Rows of columns beside the lists, likewise, for each tile.
  std::vector<uint32_t> row_counts_, rows_;
  size_t row_capacity_ = 0;
};

}  // namespace keyhole::runtime
