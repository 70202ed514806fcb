// A session beside a double-precision model of the same sequence.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "keyhole/inspect.h"
#include "keyhole/keyhole.h"
#include "keyhole/layers.h"
#include "keyhole/save.h"
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

keyhole_engine_config small_engine(uint32_t threads = 2);

EnginePtr make_engine(const keyhole_engine_config& c);

keyhole_session_config small_session();

SessionPtr make_session(keyhole_engine* engine, const keyhole_session_config& c);
SessionPtr fork_of(keyhole_session* s);
/// The session that was saved to the file.
SessionPtr load_of(keyhole_engine* engine, const std::string& path);

/// Expects the text of this thread's last error to have this part.
inline void expect_error_text(const std::string& part) {
  EXPECT_NE(std::string(keyhole_last_error()).find(part), std::string::npos)
      << keyhole_last_error();
}

/// Random numbers that fp16 and bf16 hold exactly (multiples of 1/16 up to 4), so that the model needs no
/// rounding of its own.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : engine_(seed) {}
  float next() {
    float x;
    draw_sixteenths(engine_, &x, 1);
    return x;
  }
  std::vector<float> many(size_t n) {
    std::vector<float> v(n);
    draw_sixteenths(engine_, v.data(), n);
    return v;
  }
  uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(engine_); }

 private:
  std::mt19937_64 engine_;
};

/// Elements [begin, end).
inline std::vector<float> slice(const std::vector<float>& x, size_t begin, size_t end) {
  return {x.begin() + static_cast<std::ptrdiff_t>(begin),
          x.begin() + static_cast<std::ptrdiff_t>(end)};
}

inline keyhole_tensor tensor(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return keyhole_tensor_host(v.data(), KEYHOLE_F32, static_cast<int32_t>(shape.size()),
                             shape.begin());
}

/// All tokens of all layers, attended in double precision, with learned sinks and what layers have of their own.
class Model {
 public:
  explicit Model(const keyhole_engine_config& c);

  void append(uint32_t layer, const std::vector<float>& k, const std::vector<float>& v);
  void truncate(uint32_t n);
  /// Takes tokens [first, first + count) out of a layer.
  void remove(uint32_t layer, uint32_t first, uint32_t count);
  /// Keeps, of a layer's newest n tokens, those at `path`.
  void keep(uint32_t layer, uint32_t n, const std::vector<uint32_t>& path);
  /// A model with the same tokens but without learned sinks.
  [[nodiscard]] Model without_sinks() const;
  /// The keys `[tokens, Hkv, d]`, and below the values `[tokens, Hkv, dv]`, to be changed.
  std::vector<float>& keys(uint32_t layer) { return layers_[layer].k; }
  std::vector<float>& values(uint32_t layer) { return layers_[layer].v; }
  [[nodiscard]] uint32_t tokens(uint32_t layer) const;

  /// Attends by q `[Hq, d]` over the tokens for which `use(token)` is true, in a sliding layer over the newest of
  /// these; returns o and fills lse.
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
                                 std::vector<double>& lse) const;

 private:
  struct Heads {
    uint32_t hq, hkv, d, dv;
  };
  [[nodiscard]] Heads heads(uint32_t layer) const;
  [[nodiscard]] size_t first_q_head(uint32_t layer) const;

  struct Layer {
    std::vector<float> k, v;
  };
  keyhole_engine_config c_;
  double scale_;
  std::vector<float> sinks_;               ///< of each layer in turn `[q_heads]`; empty: none
  std::vector<keyhole_layer_config> own_;  ///< `[layers]`; empty: layers are alike
  std::vector<Layer> layers_;
};

/// The sizes and tensors of one shape.
struct Shape {
  explicit Shape(const keyhole_engine_config& c)
      : hq(c.q_heads),
        hkv(c.kv_heads),
        d(c.head_dim),
        dv(c.value_dim != 0 ? c.value_dim : c.head_dim),
        values_in_keys(c.values_in_keys != 0) {}
  /// The shape of a layer that may have heads of its own.
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
  /// Values for tokens with these keys: random, or, where the model has values in keys, the keys' first components.
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
  /// The value tensor that calls take.
  [[nodiscard]] const keyhole_tensor* given(const keyhole_tensor& v) const {
    return values_in_keys ? nullptr : &v;
  }
};

/// Appends n random tokens to a layer of both session and model.
void prefill_both(keyhole_session* s, Model& model, const Shape& shape, uint32_t layer, uint32_t n,
                  Numbers& numbers);

/// The session's answer to q without appending.
struct Answer {
  std::vector<float> o, lse;
};
Answer attend_only(keyhole_session* s, const Shape& shape, uint32_t layer,
                   const std::vector<float>& q);

/// Compares with the truth. With |values| <= 4 and n tokens, fp32 accumulation keeps 1e-4 with room to spare.
void expect_near(const Answer& seen, const std::vector<double>& o, const std::vector<double>& lse,
                 double tolerance = 1e-4);

void expect_exact(keyhole_session* s, const Model& model, const Shape& shape, uint32_t layer,
                  Numbers& numbers);

keyhole_layer_tokens layer_tokens(const keyhole_session* s, uint32_t layer);

keyhole_statistics statistics(const keyhole_session* s);

}  // namespace keyhole::test
