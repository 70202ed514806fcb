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
  double scale = 0.0;    ///< of the logits; 0: 1 / sqrt(d)
  double softcap = 0.0;  ///< c > 0: logit = c * tanh(scale * q.k / c)

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
};

/// Attention of tokens [first_query, tokens) to themselves and all tokens before them, or with a window w > 0 to the
/// w - 1 before them (token i to j with i - j < w). Tiles of queries x keys by single-threaded sgemm with an online
/// softmax between the two products (FlashAttention's scheme), spread over the team; tiles above the diagonal or before
/// the window are not computed.
///   q    `[tokens, Hq, d]`, whose rows from first_query on are replaced by the output
///   k, v `[tokens, Hkv, d]`
/// All after RoPE. SingleThreadedBlas must be alive. `on_cells` (may be empty) is called on the calling thread now and
/// then with the number of (query token, key) cells finished since the last call, for all heads; over a call they add
/// up to causal_cells().
class CausalAttention {
 public:
  CausalAttention(const AttentionShape& shape, Team& team);

  void run(float* q, const float* k, const float* v, size_t tokens, size_t first_query,
           const std::function<void(size_t)>& on_cells, size_t window = 0);

 private:
  struct Scratch {
    std::vector<float> q, scores, out, maxima, sums;
  };
  void tile(float* q, const float* k, const float* v, size_t first, size_t count, size_t window,
            uint32_t kv_head, Scratch& scratch) const;

  AttentionShape shape_;
  Team& team_;
  size_t tile_tokens_;            // query tokens of a tile
  std::vector<Scratch> scratch_;  // one per member of the team
};

/// Number of cells of the causal triangle below the rows [first_query, tokens); with a window at most that many of
/// each row.
[[nodiscard]] size_t causal_cells(size_t tokens, size_t first_query, size_t window = 0);

}  // namespace keyhole::tools
