// Stored K and V handed back: the numbers that went in, wherever the tokens lie, beside a copy of them that the test
// keeps.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

/// Tokens [first, first + n) as the session hands them back, in fp32.
struct Rows {
  std::vector<float> k, v;
};

Rows get_rows(keyhole_session* s, const Shape& shape, uint32_t layer, uint32_t first, uint32_t n) {
  Rows rows{std::vector<float>(shape.kv(n), NAN), std::vector<float>(shape.v(n), NAN)};
  const auto k = tensor(rows.k, {n, shape.hkv, shape.d}),
             v = tensor(rows.v, {n, shape.hkv, shape.dv});
  EXPECT_OK(keyhole_session_get_rows(s, layer, first, &k, shape.given(v)));
  return rows;
}

/// Tokens [first, first + n) of the model's numbers.
std::vector<float> part(const std::vector<float>& all, size_t width, uint32_t first, uint32_t n) {
  return {all.begin() + static_cast<ptrdiff_t>(first * width),
          all.begin() + static_cast<ptrdiff_t>((first + n) * width)};
}

void expect_rows(keyhole_session* s, Model& model, const Shape& shape, uint32_t layer,
                 uint32_t first, uint32_t n) {
  SCOPED_TRACE("tokens " + std::to_string(first) + " to " + std::to_string(first + n));
  const Rows rows = get_rows(s, shape, layer, first, n);
  EXPECT_EQ(rows.k, part(model.keys(layer), shape.kv(1), first, n));
  if (!shape.values_in_keys) {
    EXPECT_EQ(rows.v, part(model.values(layer), shape.v(1), first, n));
  }
}

struct Case {
  const char* name;
  keyhole_dtype kv_dtype;
  uint32_t value_dim;
  int32_t values_in_keys;
};

class GetRows : public testing::TestWithParam<Case> {
 protected:
  GetRows() {
    config_.kv_dtype = GetParam().kv_dtype;
    config_.value_dim = GetParam().value_dim;
    config_.values_in_keys = GetParam().values_in_keys;
  }
  keyhole_engine_config config_ = small_engine();
  Numbers numbers_{5};
};

TEST_P(GetRows, AreWhatWentIn) {
  const auto engine = make_engine(config_);
  const auto session = make_session(engine.get(), small_session());
  Model model(config_);
  const Shape shape(config_);
  // Up to 4 tokens lie in the sink, at least 16 in the window; the others are offloaded, in blocks of 8.
  for (const uint32_t more : {1U, 2U, 17U, 40U, 3U, 90U}) {
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      prefill_both(session.get(), model, shape, layer, more, numbers_);
    }
    const uint32_t tokens = model.tokens(0);
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      expect_rows(session.get(), model, shape, layer, 0, tokens);
      for (int i = 0; i < 10; ++i) {
        const uint32_t first = numbers_.below(tokens);
        expect_rows(session.get(), model, shape, layer, first, 1 + numbers_.below(tokens - first));
      }
    }
  }
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  ASSERT_OK(keyhole_session_truncate(session.get(), 70));
  model.truncate(70);
  expect_rows(session.get(), model, shape, 1, 0, 70);
  expect_rows(session.get(), model, shape, 1, 70, 0);
}

// Appended to another session, they make its answers the first one's.
TEST_P(GetRows, MakeTheSameSessionAgain) {
  const auto engine = make_engine(config_);
  const auto from = make_session(engine.get(), small_session()),
             to = make_session(engine.get(), small_session());
  Model model(config_);
  const Shape shape(config_);
  for (uint32_t layer = 0; layer < config_.layers; ++layer) {
    prefill_both(from.get(), model, shape, layer, 100, numbers_);
    const Rows rows = get_rows(from.get(), shape, layer, 0, 100);
    const auto k = tensor(rows.k, {100, shape.hkv, shape.d}),
               v = tensor(rows.v, {100, shape.hkv, shape.dv});
    ASSERT_OK(keyhole_session_append(to.get(), layer, &k, shape.given(v), nullptr));
    const auto q = numbers_.many(shape.q(1));
    EXPECT_EQ(attend_only(from.get(), shape, layer, q).o, attend_only(to.get(), shape, layer, q).o);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GetRows,
                         testing::Values(Case{"f16", KEYHOLE_F16, 0, 0},
                                         Case{"bf16", KEYHOLE_BF16, 0, 0},
                                         Case{"f32", KEYHOLE_F32, 0, 0},
                                         Case{"narrow_values", KEYHOLE_F16, 48, 0},
                                         Case{"values_in_keys", KEYHOLE_BF16, 48, 1}),
                         [](const auto& test) { return std::string(test.param.name); });

// A channel of a block is off by half a step of its scale, 1/127 of the largest number there, at most; and by bf16's
// rounding of the scale, 2^-8 of the number.
TEST(GetRowsOf, Int8AreTheNumbersThatTheyStandFor) {
  const auto config = small_engine();
  const auto engine = make_engine(config);
  auto sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = 256;
  const auto session = make_session(engine.get(), sc);
  Model model(config);
  const Shape shape(config);
  Numbers numbers(6);
  prefill_both(session.get(), model, shape, 0, 900, numbers);
  const auto counts = layer_tokens(session.get(), 0);
  const uint32_t offloaded = counts.indexed + counts.pending;
  ASSERT_EQ(0U, offloaded % 256);
  ASSERT_NE(0U, offloaded);
  const Rows rows = get_rows(session.get(), shape, 0, 0, 900);
  const size_t width = shape.kv(1);
  size_t changed = 0;
  for (size_t i = 0; i < rows.k.size(); ++i) {
    const size_t token = i / width;
    const bool is_offloaded = token >= counts.sink && token < counts.sink + offloaded;
    const float k = model.keys(0)[i], allowed = is_offloaded ? 4.0F / 254 + std::abs(k) / 128 : 0;
    ASSERT_NEAR(k, rows.k[i], allowed) << "number " << i % width << " of token " << token;
    ASSERT_NEAR(model.values(0)[i], rows.v[i],
                is_offloaded ? 4.0F / 254 + std::abs(model.values(0)[i]) / 128 : 0);
    changed += k != rows.k[i] ? 1 : 0;
  }
  EXPECT_NE(0U, changed);
}

TEST(GetRowsOf, SlidingLayersAreTheNewest) {
  auto config = small_engine();
  std::vector<keyhole_layer_config> layers(config.layers);
  for (auto& layer : layers) keyhole_layer_config_init(&layer, &config);
  layers[1].window = 20;
  config.layer_configs = layers.data();
  config.layer_count = config.layers;
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(7);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    prefill_both(session.get(), model, shape, layer, 600, numbers);
  }
  expect_rows(session.get(), model, shape, 1, 580, 20);
  std::vector<float> rows(shape.kv(600));
  const auto all = tensor(rows, {600, shape.hkv, shape.d});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_get_rows(session.get(), 1, 0, &all, nullptr));
  EXPECT_NE(std::string::npos, std::string(keyhole_last_error()).find("to 600, which it holds"))
      << keyhole_last_error();
}

TEST(GetRowsOf, StepsOnAStreamAreThere) {
  auto config = small_engine(3);
  StreamEngine engine(config);
  const auto session = make_session(engine.handle.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(8);
  prefill_both(session.get(), model, shape, 0, 60, numbers);
  for (int i = 0; i < 30; ++i) {
    const auto q = numbers.many(shape.q(1)), k = numbers.many(shape.kv(1)),
               v = numbers.many(shape.kv(1));
    std::vector<float> o(shape.o(1));
    const auto tq = on_device(q, {shape.hq, shape.d}), tk = on_device(k, {shape.hkv, shape.d}),
               tv = on_device(v, {shape.hkv, shape.d}), out = on_device(o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend(session.get(), 0, &tq, &tk, &tv, &out, nullptr));
    model.append(0, k, v);
    ASSERT_OK(keyhole_session_synchronize(session.get()));
  }
  expect_rows(session.get(), model, shape, 0, 0, 90);
}

TEST(GetRowsOf, TensorsOfOtherLayouts) {
  const auto config = small_engine();
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(9);
  prefill_both(session.get(), model, shape, 0, 50, numbers);
  // Head by head, `[Hkv, n, d]` in memory.
  std::vector<float> rows(shape.kv(50), NAN);
  auto k = tensor(rows, {50, shape.hkv, shape.d});
  k.strides[0] = shape.d;
  k.strides[1] = 50 * shape.d;
  ASSERT_OK(keyhole_session_get_rows(session.get(), 0, 0, &k, nullptr));
  for (int64_t t = 0; t < 50; ++t) {
    for (int64_t i = 0; i < shape.hkv * shape.d; ++i) {
      const auto head = i / shape.d, at = head * 50 * shape.d + t * shape.d + i % shape.d;
      ASSERT_EQ(model.keys(0)[static_cast<size_t>(t * shape.hkv * shape.d + i)],
                rows[static_cast<size_t>(at)]);
    }
  }
}

TEST(GetRowsOf, WhatIsWrongIsSaid) {
  const auto config = small_engine();
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(10);
  prefill_both(session.get(), model, shape, 0, 50, numbers);
  std::vector<float> rows(shape.kv(10));
  const auto k = tensor(rows, {10, shape.hkv, shape.d});
  const auto refused = [&](uint32_t layer, uint32_t first, const keyhole_tensor* keys,
                           const std::string& text) {
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
              keyhole_session_get_rows(session.get(), layer, first, keys, nullptr));
    EXPECT_NE(std::string::npos, std::string(keyhole_last_error()).find(text))
        << keyhole_last_error();
  };
  refused(2, 0, &k, "layer");
  refused(0, 41, &k, "tokens 41 to 51 of layer 0, allowed: from 0 to 50");
  refused(0, UINT32_MAX, &k, "allowed: from 0 to 50");
  refused(0, 0, nullptr, "k and v are NULL");
  const auto other = tensor(rows, {10, shape.hkv * 2, shape.d / 2});
  refused(0, 0, &other, "needed: [n, 2, 64]");
  auto overlapping = k;
  overlapping.strides[0] = 1;
  refused(0, 0, &overlapping, "overlap");
}

// What fp16 cannot hold: stored in bf16.
TEST(GetRowsOf, NumbersBeyondTheTensorAreRefused) {
  auto config = small_engine();
  config.kv_dtype = KEYHOLE_BF16;
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  const Shape shape(config);
  const std::vector<float> k(shape.kv(1), 1e9F), v(shape.kv(1), 1.0F);
  const auto tk = tensor(k, {1, shape.hkv, shape.d}), tv = tensor(v, {1, shape.hkv, shape.d});
  ASSERT_OK(keyhole_session_append(session.get(), 0, &tk, &tv, nullptr));
  std::vector<uint16_t> halves(shape.kv(1));
  const int64_t extents[] = {1, shape.hkv, shape.d};
  const auto half = keyhole_tensor_host(halves.data(), KEYHOLE_F16, 3, extents);
  EXPECT_OK(keyhole_session_get_rows(session.get(), 0, 0, nullptr, &half));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_get_rows(session.get(), 0, 0, &half, nullptr));
  EXPECT_NE(std::string::npos, std::string(keyhole_last_error()).find("beyond what f16 holds"))
      << keyhole_last_error();
}

}  // namespace
}  // namespace keyhole::test
