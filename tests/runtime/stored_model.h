// A session's offloaded tokens after rounding to int8, computed by a quantiser of the tests' own.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/half.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

inline constexpr uint32_t kInt8Block = 256;

inline float nearest_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t below = bits & 0xFFFF0000U;
  const uint32_t rest = bits & 0xFFFFU;
  const bool up = rest > 0x8000U || (rest == 0x8000U && (bits & 0x10000U) != 0);
  return std::bit_cast<float>(up ? below + 0x10000U : below);
}

inline float rounded_to(float x, keyhole_dtype dtype) {
  if (dtype == KEYHOLE_F32) return x;
  return dtype == KEYHOLE_BF16 ? nearest_bf16(x) : cpu::f16_to_f32(cpu::f32_to_f16(x));
}

/// Quantises tokens [first, first + 256) of `[tokens, width]`: each channel becomes whole multiples of its scale.
inline void quantise(std::vector<float>& x, size_t first, size_t width) {
  for (size_t j = 0; j < width; ++j) {
    float most = 0.0F;
    for (size_t t = first; t < first + kInt8Block; ++t)
      most = std::max(most, std::fabs(x[t * width + j]));
    const float scale = nearest_bf16(most / 127.0F);
    for (size_t t = first; t < first + kInt8Block; ++t) {
      float& e = x[t * width + j];
      e = scale == 0.0F ? 0.0F : scale * std::clamp(std::nearbyint(e / scale), -127.0F, 127.0F);
    }
  }
}

/// The model of a sequence, with its tokens as int8 leaves them where they are kept so.
class StoredModel : public Model {
 public:
  explicit StoredModel(const keyhole_engine_config& c, keyhole_kv_host how = KEYHOLE_KV_HOST_SAME)
      : Model(c), c_(c), how_(how), rows_(c.layers, 0) {}

  /// Follows the session; called after a call that has appended tokens, or taken some away.
  void follow(const keyhole_session* s) {
    if (how_ != KEYHOLE_KV_HOST_INT8) return;
    for (uint32_t l = 0; l < c_.layers; ++l) {
      const auto t = layer_tokens(s, l);
      const uint32_t now = t.total - t.sink - t.window;
      ASSERT_EQ(now % kInt8Block, 0U);
      for (auto* x : {&keys(l), &values(l)}) {
        for (uint32_t row = rows_[l]; row < now; row += kInt8Block) {
          quantise(*x, t.sink + row, width());
        }
        // The rest of a block is in the window again, in the dtype of K and V.
        for (size_t i = (size_t{t.sink} + now) * width();
             i < std::min((size_t{t.sink} + rows_[l]) * width(), x->size()); ++i) {
          (*x)[i] = rounded_to((*x)[i], c_.kv_dtype);
        }
      }
      rows_[l] = now;
    }
  }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return rows_[layer]; }

 private:
  [[nodiscard]] size_t width() const { return size_t{c_.kv_heads} * c_.head_dim; }
  keyhole_engine_config c_;
  keyhole_kv_host how_;
  std::vector<uint32_t> rows_;
};

}  // namespace keyhole::test
