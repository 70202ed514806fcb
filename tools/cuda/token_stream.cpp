// The code that is the same with and without CUDA.
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

uint64_t weight_bytes(const TokenStreamShape& s) {
  if (!s.weights) return 0;
  const uint64_t hidden = s.hidden;
  const uint64_t of_queries = uint64_t{s.q_heads} * s.head_dim;
  const uint64_t of_keys = uint64_t{s.kv_heads} * s.head_dim;
  const uint64_t layer = (of_queries + 2 * of_keys) * hidden + hidden * of_queries +
                         uint64_t{3} * s.intermediate * hidden;
  return sizeof(uint16_t) * (s.layers * layer + s.vocabulary * hidden);
}

}  // namespace keyhole::tools
