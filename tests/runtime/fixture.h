// A session beside a double-precision model of the same sequence.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "keyhole/keyhole.h"
#include "tests/runtime/exact_sums.h"
#include "tests/sanitized.h"
#include "tests/shapes.h"

namespace keyhole::test {

struct EngineDeleter {
  void operator()(keyhole_engine* e) const { keyhole_engine_destroy(e); }
};
struct SessionDeleter {
  void operator()(keyhole_session* s) const { keyhole_session_destroy(s); }
};
using EnginePtr = std::unique_ptr<keyhole_engine, EngineDeleter>;
using SessionPtr = std::unique_ptr<keyhole_session, SessionDeleter>;

#define ASSERT_OK(call) ASSERT_EQ(KEYHOLE_OK, (call)) << keyhole_last_error()
#define EXPECT_OK(call) EXPECT_EQ(KEYHOLE_OK, (call)) << keyhole_last_error()

inline keyhole_engine_config small_engine(uint32_t threads = 2) {
  keyhole_engine_config c;
  keyhole_engine_config_init(&c);
  c.layers = 2;
  c.q_heads = 4;
  c.kv_heads = 2;
  c.head_dim = 64;
  c.threads = threads;
  c.device = KEYHOLE_DEVICE_HOST;
  return c;
}

inline EnginePtr make_engine(const keyhole_engine_config& c) {
  keyhole_engine* e = nullptr;
  EXPECT_OK(keyhole_engine_create(&c, &e));
  return EnginePtr(e);
}

inline keyhole_session_config small_session() {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = 4096;
  c.sink = 4;
  c.window = 16;
  c.flush_block = 8;
  c.append_block = 32;
  c.index = "flat";
  c.budget.top_k = 4096;
  return c;
}

inline SessionPtr make_session(keyhole_engine* engine, const keyhole_session_config& c) {
  keyhole_session* s = nullptr;
  EXPECT_OK(keyhole_session_create(engine, &c, &s));
  return SessionPtr(s);
}

/// Random numbers that fp16 and bf16 hold exactly (multiples of 1/16 up to 4), so that the model needs no
/// rounding of its own.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : engine_(seed) {}
  float next() {
    return static_cast<float>(std::uniform_int_distribution<int>(-64, 64)(engine_)) / 16.0F;
  }
  std::vector<float> many(size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = next();
    return v;
  }
  uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(engine_); }

 private:
  std::mt19937_64 engine_;
};

inline keyhole_tensor tensor(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return keyhole_tensor_host(v.data(), KEYHOLE_F32, static_cast<int32_t>(shape.size()),
                             shape.begin());
}

/// All tokens of all layers, attended in double precision, with learned sinks and what layers have of their own.
class Model {
 public:
  explicit Model(const keyhole_engine_config& c)
      : c_(c),
        scale_(c.scale > 0 ? c.scale : 1.0 / std::sqrt(double{1} * c.head_dim)),
        layers_(c.layers) {
    if (c.layer_configs != nullptr) {
      own_.assign(c.layer_configs, c.layer_configs + c.layers);
    }
    if (c.sink_logits != nullptr) {
      sinks_.assign(c.sink_logits, c.sink_logits + first_q_head(c.layers));
    }
  }

  void append(uint32_t layer, const std::vector<float>& k, const std::vector<float>& v) {
    layers_[layer].k.insert(layers_[layer].k.end(), k.begin(), k.end());
    layers_[layer].v.insert(layers_[layer].v.end(), v.begin(), v.end());
  }
  void truncate(uint32_t n) {
    for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& l = layers_[layer];
      const Heads s = heads(layer);
      const size_t keep = std::min(l.k.size() / s.d, size_t{n} * s.hkv);
      l.k.resize(keep * s.d);
      l.v.resize(keep * s.dv);
    }
  }
  /// The same tokens without learned sinks.
  [[nodiscard]] Model without_sinks() const {
    Model m = *this;
    m.sinks_.clear();
    return m;
  }
  /// `[tokens, Hkv, d]` and `[tokens, Hkv, dv]`, to change.
  std::vector<float>& keys(uint32_t layer) { return layers_[layer].k; }
  std::vector<float>& values(uint32_t layer) { return layers_[layer].v; }
  [[nodiscard]] uint32_t tokens(uint32_t layer) const {
    return static_cast<uint32_t>(layers_[layer].k.size() /
                                 (size_t{heads(layer).hkv} * heads(layer).d));
  }

  /// Attention of q `[Hq, d]` over the tokens for which `use(token)`, of a sliding layer the newest of these; returns o and
  /// fills lse.
  template <class Use>
  std::vector<double> attend(uint32_t layer, const std::vector<float>& q, std::vector<double>& lse,
                             Use use) const {
    const auto [hq, hkv, d, dv] = heads(layer);
    const uint32_t group = hq / hkv;
    std::vector<double> out(size_t{hq} * dv, 0.0);
    lse.assign(hq, -INFINITY);
    double scale = scale_, softcap = c_.softcap;
    std::vector<uint32_t> used;
    for (uint32_t t = 0; t < tokens(layer); ++t) {
      if (use(t)) used.push_back(t);
    }
    if (!own_.empty()) {
      scale = own_[layer].scale > 0 ? own_[layer].scale : 1.0 / std::sqrt(double{1} * d);
      softcap = own_[layer].softcap;
      const uint32_t window = own_[layer].window;
      if (window != 0 && used.size() > window) used.erase(used.begin(), used.end() - window);
    }
    for (uint32_t h = 0; h < hq; ++h) {
      std::vector<double> logits;
      const double sink = sinks_.empty() ? -INFINITY : sinks_[first_q_head(layer) + h];
      double top = sink;
      for (const uint32_t t : used) {
        const float* k = &layers_[layer].k[(size_t{t} * hkv + h / group) * d];
        double logit = scale * exact_dot(q.data() + size_t{h} * d, k, d);
        if (softcap > 0) logit = softcap * std::tanh(logit / softcap);
        logits.push_back(logit);
        top = std::max(top, logit);
      }
      double sum = top == -INFINITY ? 0.0 : std::exp(sink - top);
      for (const double l : logits) sum += std::exp(l - top);
      if (sum == 0.0) continue;
      lse[h] = top + std::log(sum);
      for (size_t j = 0; j < used.size(); ++j) {
        const double w = std::exp(logits[j] - lse[h]);
        const float* v = &layers_[layer].v[(size_t{used[j]} * hkv + h / group) * dv];
        add_weighted(out.data() + size_t{h} * dv, w, v, dv);
      }
    }
    return out;
  }
  std::vector<double> attend_all(uint32_t layer, const std::vector<float>& q,
                                 std::vector<double>& lse) const {
    return attend(layer, q, lse, [](uint32_t) { return true; });
  }

 private:
  struct Heads {
    uint32_t hq, hkv, d, dv;
  };
  [[nodiscard]] Heads heads(uint32_t layer) const {
    const auto or_engine = [](uint32_t own, uint32_t engine) { return own != 0 ? own : engine; };
    const keyhole_layer_config own = own_.empty() ? keyhole_layer_config{} : own_[layer];
    const uint32_t d = or_engine(own.head_dim, c_.head_dim);
    return {or_engine(own.q_heads, c_.q_heads), or_engine(own.kv_heads, c_.kv_heads), d,
            or_engine(c_.value_dim, d)};
  }
  [[nodiscard]] size_t first_q_head(uint32_t layer) const {
    size_t first = 0;
    for (uint32_t l = 0; l < layer; ++l) first += heads(l).hq;
    return first;
  }

  struct Layer {
    std::vector<float> k, v;
  };
  keyhole_engine_config c_;
  double scale_;
  std::vector<float> sinks_;               ///< of each layer in turn `[q_heads]`; empty: none
  std::vector<keyhole_layer_config> own_;  ///< `[layers]`; empty: layers are alike
  std::vector<Layer> layers_;
};

/// Sizes and tensors of one shape.
struct Shape {
  explicit Shape(const keyhole_engine_config& c)
      : hq(c.q_heads),
        hkv(c.kv_heads),
        d(c.head_dim),
        dv(c.value_dim != 0 ? c.value_dim : c.head_dim),
        values_in_keys(c.values_in_keys != 0) {}
  /// Of a layer that may have heads of its own.
  Shape(const keyhole_engine_config& c, uint32_t layer) : Shape(c) {
    if (c.layer_configs == nullptr) return;
    const keyhole_layer_config& own = c.layer_configs[layer];
    if (own.q_heads != 0) hq = own.q_heads;
    if (own.kv_heads != 0) hkv = own.kv_heads;
    if (own.head_dim != 0) d = own.head_dim;
    if (c.value_dim == 0) dv = d;
  }
  int64_t hq, hkv, d, dv;  ///< dv: of values and outputs
  bool values_in_keys;
  [[nodiscard]] size_t kv(uint32_t n) const { return static_cast<size_t>(n * hkv * d); }
  [[nodiscard]] size_t v(uint32_t n) const { return static_cast<size_t>(n * hkv * dv); }
  [[nodiscard]] size_t q(uint32_t n) const { return static_cast<size_t>(n * hq * d); }
  [[nodiscard]] size_t o(uint32_t n) const { return static_cast<size_t>(n * hq * dv); }
  /// Values of tokens with these keys: random, or where the model has them there the keys' first components.
  template <class Random>
  [[nodiscard]] std::vector<float> values_of(const std::vector<float>& k, Random& numbers) const {
    const size_t rows = k.size() / static_cast<size_t>(d), width = static_cast<size_t>(dv);
    if (!values_in_keys) return numbers.many(rows * width);
    std::vector<float> v;
    for (size_t i = 0; i < rows; ++i) {
      const auto row = k.begin() + static_cast<std::ptrdiff_t>(i * static_cast<size_t>(d));
      v.insert(v.end(), row, row + dv);
    }
    return v;
  }
  /// What calls take of values.
  [[nodiscard]] const keyhole_tensor* given(const keyhole_tensor& v) const {
    return values_in_keys ? nullptr : &v;
  }
};

/// Appends n random tokens to a layer of both.
inline void prefill_both(keyhole_session* s, Model& model, const Shape& shape, uint32_t layer,
                         uint32_t n, Numbers& numbers) {
  const auto k = numbers.many(shape.kv(n));
  const auto v = shape.values_of(k, numbers);
  const auto q = numbers.many(shape.q(n));
  const auto tk = tensor(k, {n, shape.hkv, shape.d});
  const auto tv = tensor(v, {n, shape.hkv, shape.dv});
  const auto tq = tensor(q, {n, shape.hq, shape.d});
  ASSERT_OK(keyhole_prefill(s, layer, &tk, shape.given(tv), &tq));
  model.append(layer, k, v);
}

/// The session's answer to q without appending.
struct Answer {
  std::vector<float> o, lse;
};
inline Answer attend_only(keyhole_session* s, const Shape& shape, uint32_t layer,
                          const std::vector<float>& q) {
  Answer a{std::vector<float>(shape.o(1)), std::vector<float>(static_cast<size_t>(shape.hq))};
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(a.o, {shape.hq, shape.dv});
  EXPECT_OK(keyhole_attend(s, layer, &tq, nullptr, nullptr, &out, a.lse.data()));
  return a;
}

/// |values| <= 4 and n tokens: fp32 accumulation keeps 1e-4 with room to spare.
inline void expect_near(const Answer& seen, const std::vector<double>& o,
                        const std::vector<double>& lse, double tolerance = 1e-4) {
  ASSERT_EQ(seen.o.size(), o.size());
  for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(seen.o[i], o[i], tolerance) << "element " << i;
  for (size_t h = 0; h < lse.size(); ++h) {
    if (seen.lse[h] == lse[h]) continue;  // both of no token
    ASSERT_NEAR(seen.lse[h], lse[h], tolerance) << "head " << h;
  }
}

inline void expect_exact(keyhole_session* s, const Model& model, const Shape& shape, uint32_t layer,
                         Numbers& numbers) {
  const auto q = numbers.many(shape.q(1));
  std::vector<double> lse;
  const auto o = model.attend_all(layer, q, lse);
  expect_near(attend_only(s, shape, layer, q), o, lse);
}

inline keyhole_layer_tokens layer_tokens(const keyhole_session* s, uint32_t layer) {
  keyhole_layer_tokens t;
  keyhole_layer_tokens_init(&t);
  EXPECT_OK(keyhole_get_layer_tokens(s, layer, &t));
  return t;
}

inline keyhole_statistics statistics(const keyhole_session* s) {
  keyhole_statistics st;
  keyhole_statistics_init(&st);
  EXPECT_OK(keyhole_get_statistics(s, &st));
  return st;
}

}  // namespace keyhole::test
