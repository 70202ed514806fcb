// Exact causal attention over a whole prompt: the prefill's attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tools/llama/team.h"

namespace keyhole::tools {

struct AttentionShape {
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
};

/// Attention of tokens [first_query, tokens) to themselves and all tokens before them, scaled by
/// 1 / sqrt(d). Tiles of queries x keys by single-threaded sgemm with an online softmax between the two
/// products (FlashAttention's scheme), spread over the team; tiles above the diagonal are not computed.
///   q    `[tokens, Hq, d]`, whose rows from first_query on are replaced by the output
///   k, v `[tokens, Hkv, d]`
/// All after RoPE. SingleThreadedBlas must be alive. `on_cells` (may be empty) is called from the calling
/// thread now and then with the number of (query token, key) cells finished since the last call, for all
/// heads; over a call they add up to causal_cells().
class CausalAttention {
 public:
  CausalAttention(const AttentionShape& shape, Team& team);

  void run(float* q, const float* k, const float* v, size_t tokens, size_t first_query,
           const std::function<void(size_t)>& on_cells);

 private:
  struct Scratch {
    std::vector<float> q, scores, out, maxima, sums;
  };
  void tile(float* q, const float* k, const float* v, size_t first, size_t count, uint32_t kv_head,
            Scratch& scratch) const;

  AttentionShape shape_;
  Team& team_;
  size_t tile_tokens_;            // query tokens of a tile
  std::vector<Scratch> scratch_;  // one per member of the team
};

/// Cells of the causal triangle below the rows [first_query, tokens).
[[nodiscard]] size_t causal_cells(size_t tokens, size_t first_query);

}  // namespace keyhole::tools
