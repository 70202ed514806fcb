// What is special of extends of many new tokens: the patterns by which they attend (keyhole_session_set_extend_pattern)
// and the blocks that they have attended so far, and whether they are a prompt's (keyhole_session_set_prompt_chunk).
// Who attends by them: host_pattern.h with tensors in host memory, device_extender.h with tensors on a device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu/prompt.h"
#include "runtime/engine/engine.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/extend_args.h"

namespace keyhole::runtime {

class ExtendPatterns {
 public:
  /// All that it is given outlives it; of params the mode counts, which may change.
  ExtendPatterns(const Engine& engine, const SessionParams& params, const Sequence& sequence)
      : engine_(&engine), params_(&params), sequence_(&sequence) {}

  /// Sets the pattern of extends of so many tokens or more, 0: as the library chooses; null: there is none. Strong
  /// guarantee.
  void set(const char* pattern, uint32_t tokens);
  /// Extends of so many tokens or more are chunks of a prompt; 0: none is. Throws Error(invalid_argument).
  void set_prompt_chunk(uint32_t tokens);
  void copy_from(const ExtendPatterns& from);

  /// Whether the pattern that was set is about such an extend.
  [[nodiscard]] bool apply_to(uint32_t layer, const ExtendArgs& args) const;
  /// Whether the extend is a chunk of a prompt: its queries guide the index, into which it brings nothing.
  [[nodiscard]] bool is_prompt(const ExtendArgs& args) const {
    return prompt_chunk_ != 0 && args.k.tokens >= prompt_chunk_ && args.mask == nullptr;
  }
  /// Whether the least number of tokens was left to the library.
  [[nodiscard]] bool chooses_tokens() const { return from_ == 0; }
  /// The patterns of the layer's query heads.
  [[nodiscard]] std::span<const gpu::PromptPattern> of(uint32_t layer) const;

  /// Of how many blocks of codes each tile of queries attends, where an extend to `rows` offloaded rows is to attend
  /// some of them only; 0: where it is not.
  [[nodiscard]] uint32_t coded_blocks(uint32_t layer, const ExtendArgs& args, uint32_t rows) const;

  /// How many offloaded keys the query heads of n tokens have attended: the share that the blocks attended have of
  /// those seen.
  [[nodiscard]] uint64_t keys_in(uint32_t layer, uint32_t n, const gpu::PromptBlocks& blocks) const;
  /// An extend has attended these.
  void add(const gpu::PromptBlocks& blocks) {
    blocks_.attended += blocks.attended;
    blocks_.seen += blocks.seen;
  }
  /// So have n tokens behind `before`, each query head all that it sees but for blocks of codes: left_out of them,
  /// summed over the query heads of the tokens.
  void add_coded(uint32_t layer, uint32_t n, uint32_t before, uint64_t left_out);
  [[nodiscard]] const gpu::PromptBlocks& blocks() const { return blocks_; }

 private:
  const Engine* engine_;
  const SessionParams* params_;
  const Sequence* sequence_;
  std::vector<gpu::PromptPattern> patterns_;  ///< `[layers, q_heads]`; empty: none is set
  uint32_t from_ = 0;                         ///< new tokens; 0: as the library chooses
  uint32_t prompt_chunk_ = 0;                 ///< new tokens; 0: no extend is a prompt's
  gpu::PromptBlocks blocks_;
};

/// The blocks that are in `all` and were not in `before`.
[[nodiscard]] inline gpu::PromptBlocks blocks_since(const gpu::PromptBlocks& before,
                                                    const gpu::PromptBlocks& all) {
  return {all.attended - before.attended, all.seen - before.seen};
}

}  // namespace keyhole::runtime
