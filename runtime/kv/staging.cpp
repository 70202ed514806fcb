#include "runtime/kv/staging.h"

#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

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
  float scratch[kMaxHeadDim];
  const DType dtype = engine_->model().kv_dtype;
  const LayerShape of = engine_->model().of(layer);
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < of.kv_heads; ++h) {
      store_row(engine_->kernels(), rows, begin + t, h, to, dtype, of.head_dim, scratch);
      to += of.row_bytes(dtype);
    }
  }
}

}  // namespace keyhole::runtime
