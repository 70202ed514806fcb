// Sessions whose layers have heads of their own, beside attention in double precision of the same shapes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tests/runtime/fixture.h"

namespace keyhole::test {

/// The heads of a layer.
struct Heads {
  uint32_t q_heads, kv_heads, head_dim;
};

/// An engine config with layers of these shapes, to which it points, so it is neither moved nor copied.
struct ShapedConfig {
  explicit ShapedConfig(const std::vector<Heads>& heads, uint32_t threads = 2)
      : engine(small_engine(threads)), layers(heads.size()) {
    engine.layers = engine.layer_count = static_cast<uint32_t>(heads.size());
    for (size_t l = 0; l < heads.size(); ++l) {
      keyhole_layer_config_init(&layers[l], &engine);
      layers[l].q_heads = heads[l].q_heads;
      layers[l].kv_heads = heads[l].kv_heads;
      layers[l].head_dim = heads[l].head_dim;
    }
    engine.layer_configs = layers.data();
  }
  ShapedConfig(const ShapedConfig&) = delete;
  ShapedConfig& operator=(const ShapedConfig&) = delete;

  [[nodiscard]] Shape shape(uint32_t layer) const { return {engine, layer}; }

  keyhole_engine_config engine;
  std::vector<keyhole_layer_config> layers;
};

/// New tokens of a layer, and the answers to them.
struct NewTokensOf {
  std::vector<float> q, k, v;
  uint32_t n;
  Answer answer;
};

inline NewTokensOf new_tokens(const Shape& shape, uint32_t n, Numbers& numbers) {
  NewTokensOf t{numbers.many(shape.q(n)), numbers.many(shape.kv(n)), {}, n, {}};
  t.v = shape.values_of(t.k, numbers);
  t.answer = {std::vector<float>(shape.o(n), NAN),
              std::vector<float>(static_cast<size_t>(n * shape.hq), NAN)};
  return t;
}

inline keyhole_status extend(keyhole_session* s, const Shape& shape, uint32_t layer, NewTokensOf& t,
                             const uint64_t* mask = nullptr) {
  const auto tq = tensor(t.q, {t.n, shape.hq, shape.d}),
             tk = tensor(t.k, {t.n, shape.hkv, shape.d}),
             tv = tensor(t.v, {t.n, shape.hkv, shape.dv}),
             out = tensor(t.answer.o, {t.n, shape.hq, shape.dv});
  return keyhole_session_extend(s, layer, &tq, &tk, shape.given(tv), mask, &out,
                                t.answer.lse.data());
}

/// Checks the answer to each token, when the model has them as its newest tokens.
inline void expect_answers(const Model& model, const Shape& shape, uint32_t layer,
                           const NewTokensOf& t, const uint64_t* mask = nullptr,
                           double tolerance = 1e-4) {
  const uint32_t before = model.tokens(layer) - t.n;
  const auto part = [](const std::vector<float>& all, size_t from, size_t to) {
    return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(from),
                              all.begin() + static_cast<std::ptrdiff_t>(to));
  };
  const auto hq = static_cast<size_t>(shape.hq);
  for (uint32_t i = 0; i < t.n; ++i) {
    SCOPED_TRACE("layer " + std::to_string(layer) + ", token " + std::to_string(i) + " of " +
                 std::to_string(t.n) + " after " + std::to_string(before));
    std::vector<double> lse;
    const auto o =
        model.attend(layer, part(t.q, shape.q(i), shape.q(i + 1)), lse, [&](uint32_t token) {
          if (token < before) return true;
          const uint32_t j = token - before;
          return j <= i && (mask == nullptr || (mask[i] >> j & 1U) != 0);
        });
    expect_near(
        {part(t.answer.o, shape.o(i), shape.o(i + 1)), part(t.answer.lse, i * hq, (i + 1) * hq)}, o,
        lse, tolerance);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace keyhole::test
