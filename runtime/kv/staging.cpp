#include "runtime/kv/staging.h"

#include <algorithm>

#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

// Tokens of a task when many are staged: some tens of microseconds of work.
constexpr uint32_t kTokensPerTask = 128;

size_t largest_token(const ModelShape& model) {
  return model.most([&](const LayerShape& s) { return s.token_bytes(model.kv_dtype); });
}

}  // namespace

Staging::Staging(const Engine& engine, uint64_t tokens)
    : engine_(&engine),
      k_(checked_product({tokens, largest_token(engine.model())}, "staged tokens"), false),
      v_(k_.bytes(), false) {}

void Staging::stage(uint32_t layer, const TensorView& rows, uint32_t begin, uint32_t n,
                    std::byte* to) const {
  const DType dtype = engine_->model().kv_dtype;
  const LayerShape of = engine_->model().of(layer);
  const size_t token_bytes = of.row_bytes(dtype) * of.kv_heads;
  const auto stage_some = [&](uint32_t task, uint32_t) {
    float scratch[kMaxHeadDim];
    const uint32_t first = task * kTokensPerTask;
    std::byte* row = to + first * token_bytes;
    for (uint32_t t = first; t < std::min(n, first + kTokensPerTask); ++t) {
      for (uint32_t h = 0; h < of.kv_heads; ++h) {
        store_row(engine_->kernels(), rows, begin + t, h, row, dtype, of.head_dim, scratch);
        row += of.row_bytes(dtype);
      }
    }
  };
  const uint32_t tasks = (n + kTokensPerTask - 1) / kTokensPerTask;
  if (tasks > 1) return engine_->pool().run(tasks, stage_some);
  if (tasks == 1) stage_some(0, 0);
}

}  // namespace keyhole::runtime
