// What sessions are compared with, and calls with tensors of the tests' own.
#include "tests/runtime/fixture.h"

#include <algorithm>

namespace keyhole::test {

keyhole_engine_config small_engine(uint32_t threads) {
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

EnginePtr make_engine(const keyhole_engine_config& c) {
  keyhole_engine* e = nullptr;
  EXPECT_OK(keyhole_engine_create(&c, &e));
  return EnginePtr(e);
}

keyhole_session_config small_session() {
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

SessionPtr make_session(keyhole_engine* engine, const keyhole_session_config& c) {
  keyhole_session* s = nullptr;
  EXPECT_OK(keyhole_session_create(engine, &c, &s));
  return SessionPtr(s);
}

SessionPtr fork_of(keyhole_session* s) {
  keyhole_session* copy = nullptr;
  EXPECT_OK(keyhole_session_fork(s, &copy));
  return SessionPtr(copy);
}

SessionPtr load_of(keyhole_engine* engine, const std::string& path) {
  keyhole_session* s = nullptr;
  EXPECT_OK(keyhole_session_load(engine, path.c_str(), nullptr, &s));
  return SessionPtr(s);
}

Model::Model(const keyhole_engine_config& c)
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

void Model::append(uint32_t layer, const std::vector<float>& k, const std::vector<float>& v) {
  layers_[layer].k.insert(layers_[layer].k.end(), k.begin(), k.end());
  layers_[layer].v.insert(layers_[layer].v.end(), v.begin(), v.end());
}

void Model::truncate(uint32_t n) {
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    Layer& l = layers_[layer];
    const Heads s = heads(layer);
    const size_t keep = std::min(l.k.size() / s.d, size_t{n} * s.hkv);
    l.k.resize(keep * s.d);
    l.v.resize(keep * s.dv);
  }
}

void Model::remove(uint32_t layer, uint32_t first, uint32_t count) {
  const uint32_t begin = std::min(tokens(layer), first);
  const uint32_t end = begin + std::min(tokens(layer) - begin, count);
  const Heads s = heads(layer);
  const auto erase = [&](std::vector<float>& rows, size_t token) {
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(begin * token),
               rows.begin() + static_cast<std::ptrdiff_t>(end * token));
  };
  erase(layers_[layer].k, size_t{s.hkv} * s.d);
  erase(layers_[layer].v, size_t{s.hkv} * s.dv);
}

void Model::keep(uint32_t layer, uint32_t n, const std::vector<uint32_t>& path) {
  const uint32_t before = tokens(layer) - n;
  const Heads s = heads(layer);
  for (std::vector<float>* rows : {&layers_[layer].k, &layers_[layer].v}) {
    const size_t token = size_t{s.hkv} * (rows == &layers_[layer].k ? s.d : s.dv);
    std::vector<float> kept = slice(*rows, 0, before * token);
    for (const uint32_t i : path) {
      const std::vector<float> one = slice(*rows, (before + i) * token, (before + i + 1) * token);
      kept.insert(kept.end(), one.begin(), one.end());
    }
    rows->swap(kept);
  }
}

Model Model::without_sinks() const {
  Model m = *this;
  m.sinks_.clear();
  return m;
}

uint32_t Model::tokens(uint32_t layer) const {
  return static_cast<uint32_t>(layers_[layer].k.size() /
                               (size_t{heads(layer).hkv} * heads(layer).d));
}

std::vector<double> Model::attend_all(uint32_t layer, const std::vector<float>& q,
                                      std::vector<double>& lse) const {
  return attend(layer, q, lse, [](uint32_t) { return true; });
}

Model::Heads Model::heads(uint32_t layer) const {
  const auto or_engine = [](uint32_t own, uint32_t engine) { return own != 0 ? own : engine; };
  const keyhole_layer_config own = own_.empty() ? keyhole_layer_config{} : own_[layer];
  const uint32_t d = or_engine(own.head_dim, c_.head_dim);
  return {or_engine(own.q_heads, c_.q_heads), or_engine(own.kv_heads, c_.kv_heads), d,
          or_engine(c_.value_dim, d)};
}

size_t Model::first_q_head(uint32_t layer) const {
  size_t first = 0;
  for (uint32_t l = 0; l < layer; ++l) first += heads(l).hq;
  return first;
}

void prefill_both(keyhole_session* s, Model& model, const Shape& shape, uint32_t layer, uint32_t n,
                  Numbers& numbers) {
  const auto k = numbers.many(shape.kv(n));
  const auto v = shape.values_of(k, numbers);
  const auto q = numbers.many(shape.q(n));
  const auto tk = tensor(k, {n, shape.hkv, shape.d});
  const auto tv = tensor(v, {n, shape.hkv, shape.dv});
  const auto tq = tensor(q, {n, shape.hq, shape.d});
  ASSERT_OK(keyhole_session_append(s, layer, &tk, shape.given(tv), &tq));
  model.append(layer, k, v);
}

Answer attend_only(keyhole_session* s, const Shape& shape, uint32_t layer,
                   const std::vector<float>& q) {
  Answer a{std::vector<float>(shape.o(1)), std::vector<float>(static_cast<size_t>(shape.hq))};
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(a.o, {shape.hq, shape.dv});
  EXPECT_OK(keyhole_session_attend(s, layer, &tq, nullptr, nullptr, &out, a.lse.data()));
  return a;
}

void expect_near(const Answer& seen, const std::vector<double>& o, const std::vector<double>& lse,
                 double tolerance) {
  ASSERT_EQ(seen.o.size(), o.size());
  for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(seen.o[i], o[i], tolerance) << "element " << i;
  for (size_t h = 0; h < lse.size(); ++h) {
    if (seen.lse[h] == lse[h]) continue;  // both of no token
    ASSERT_NEAR(seen.lse[h], lse[h], tolerance) << "head " << h;
  }
}

void expect_exact(keyhole_session* s, const Model& model, const Shape& shape, uint32_t layer,
                  Numbers& numbers) {
  const auto q = numbers.many(shape.q(1));
  std::vector<double> lse;
  const auto o = model.attend_all(layer, q, lse);
  expect_near(attend_only(s, shape, layer, q), o, lse);
}

keyhole_layer_tokens layer_tokens(const keyhole_session* s, uint32_t layer) {
  keyhole_layer_tokens t;
  keyhole_layer_tokens_init(&t);
  EXPECT_OK(keyhole_session_get_layer_tokens(s, layer, &t));
  return t;
}

keyhole_statistics statistics(const keyhole_session* s) {
  keyhole_statistics st;
  keyhole_statistics_init(&st);
  EXPECT_OK(keyhole_session_get_statistics(s, &st));
  return st;
}

}  // namespace keyhole::test
