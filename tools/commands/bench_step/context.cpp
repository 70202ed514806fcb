#include "tools/commands/bench_step/context.h"

#include <algorithm>

#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {
namespace {

// Tokens of a chunk: 16 MiB of keys and values of 8 heads of 128, 32 MiB of queries.
constexpr uint64_t kChunk = 4096;

keyhole_tensor tokens_tensor(const uint16_t* data, size_t tokens, uint32_t heads, uint32_t dim) {
  const int64_t shape[] = {static_cast<int64_t>(tokens), heads, dim};
  return keyhole_tensor_host(data, KEYHOLE_F16, 3, shape);
}

}  // namespace

double ContextFeed::hand_over(const std::string& title, StepInputs* steps, const Take& take) {
  const StepShape shape = plan_.own_shape();
  if (steps != nullptr) {
    steps->shape = shape;
    steps->tokens = plan_.tokens();
    steps->rows.resize(size_t{plan_.tokens()} * shape.layers * shape.token_elements());
  }
  double making = 0;
  Progress bar(title);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const Clock::time_point start = Clock::now();
    LayerData data(source_, shape, plan_.turn, plan_.seed, layer, plan_.context, team_);
    if (steps != nullptr) {
      for (uint32_t token = 0; token < steps->tokens; ++token) {
        data.step(token, steps->at(token, layer));
      }
    }
    making += seconds_since(start);
    making += hand_over_layer(data, layer, steps != nullptr, take);
    bar.update(static_cast<double>(layer + 1) / shape.layers);
  }
  return making;
}

double ContextFeed::hand_over_layer(LayerData& data, uint32_t layer, bool with_queries,
                                    const Take& take) {
  const StepShape shape = plan_.own_shape();
  k_.resize(kChunk * shape.kv_elements());
  v_.resize(kChunk * shape.kv_elements());
  if (with_queries) q_.resize(kChunk * shape.q_elements());
  double making = 0;
  for (uint64_t first = 0; first < plan_.context; first += kChunk) {
    throw_if_interrupted();
    const size_t n = std::min(kChunk, plan_.context - first);
    const Clock::time_point start = Clock::now();
    data.rows(first, n, k_.data(), v_.data());
    const bool has_queries =
        with_queries && plan_.training_queries != 0 && data.queries(first, n, q_.data());
    making += seconds_since(start);
    const keyhole_tensor k = tokens_tensor(k_.data(), n, shape.kv_heads, shape.head_dim);
    const keyhole_tensor v = tokens_tensor(v_.data(), n, shape.kv_heads, shape.head_dim);
    const keyhole_tensor q = tokens_tensor(q_.data(), n, shape.q_heads, shape.head_dim);
    take(layer, k, v, has_queries ? &q : nullptr);
  }
  return making;
}

}  // namespace keyhole::tools
