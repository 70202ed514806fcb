// Every token is attended exactly once, whatever the order of prefills, steps, builds and truncations.
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

struct PropertyCase {
  uint64_t seed;
  const char* index;
  keyhole_dtype dtype;
};

class EveryTokenOnce : public ::testing::TestWithParam<PropertyCase> {};

// With k above the number of tokens an index that visits everything must give exact attention; any token
// attended twice or not at all shows in o and in lse.
TEST_P(EveryTokenOnce, AfterEveryOperation) {
  const PropertyCase param = GetParam();
  Numbers numbers(param.seed);
  auto ec = small_engine(1 + numbers.below(3));
  ec.head_dim = some_head_dim(numbers.below(1000));
  ec.kv_heads = 1 + numbers.below(3);
  ec.q_heads = ec.kv_heads * some_group(numbers.below(1000));
  ec.kv_dtype = param.dtype;
  ec.softcap = numbers.below(2) == 0 ? 0.0F : 10.0F;
  ec.scale = 0.05F;
  auto sc = small_session();
  sc.index = param.index;
  sc.sink = numbers.below(9);
  sc.window = 1 + numbers.below(24);
  sc.flush_block = 1 + numbers.below(16);
  sc.append_block = 1 + numbers.below(40);
  const uint32_t dense = 1;
  sc.dense_layers = &dense;
  sc.dense_layer_count = numbers.below(2);
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  ASSERT_NE(session, nullptr);
  Model model(ec);
  const Shape shape(ec);

  for (int step = 0; step < 40; ++step) {
    const uint32_t operation = numbers.below(10);
    SCOPED_TRACE("seed " + std::to_string(param.seed) + ", operation " + std::to_string(step) +
                 ": " + std::to_string(operation));
    if (operation < 3) {
      const uint32_t n = numbers.below(4) == 0 ? numbers.below(120) : numbers.below(12);
      for (uint32_t l = 0; l < ec.layers; ++l)
        prefill_both(session.get(), model, shape, l, n, numbers);
    } else if (operation < 7) {
      // A decoding step: the token's own K and V take part.
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const auto k = numbers.many(shape.kv(1));
        const auto v = numbers.many(shape.kv(1));
        const auto q = numbers.many(shape.q(1));
        model.append(l, k, v);
        Answer a{std::vector<float>(shape.q(1)), std::vector<float>(ec.q_heads)};
        const auto tk = tensor(k, {shape.hkv, shape.d});
        const auto tv = tensor(v, {1, shape.hkv, shape.d});
        const auto tq = tensor(q, {shape.hq, shape.d});
        const auto out = tensor(a.o, {shape.hq, shape.d});
        ASSERT_OK(keyhole_session_attend(session.get(), l, &tq, &tk, &tv, &out, a.lse.data()));
        std::vector<double> lse;
        const auto o = model.attend_all(l, q, lse);
        expect_near(a, o, lse);
      }
    } else if (operation == 7) {
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const auto t = layer_tokens(session.get(), l);
        const bool is_dense = sc.dense_layer_count == 1 && l == dense;
        EXPECT_EQ(is_dense ? 0 : t.total - t.sink - t.window, t.indexed);
      }
    } else {
      const uint32_t n = model.tokens(0) == 0 ? 0 : numbers.below(model.tokens(0) + 4);
      ASSERT_OK(keyhole_session_truncate(session.get(), n));
      model.truncate(n);
    }
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(session.get(), l);
      ASSERT_EQ(t.total, model.tokens(l));
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      ASSERT_LE(t.window, sc.window + sc.flush_block);
      if (t.total != 0) expect_exact(session.get(), model, shape, l, numbers);
    }
    if (HasFatalFailure()) return;
  }
}

std::vector<PropertyCase> property_cases() {
  std::vector<PropertyCase> all;
  uint64_t seed = 1;
  for (const char* index : {"flat", "ivf:C=4,probe=16777216"}) {
    for (const keyhole_dtype t : {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16}) {
      for (int i = 0; i < 4; ++i) all.push_back({seed++, index, t});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Random, EveryTokenOnce,
                         ::testing::ValuesIn(unless_sanitized(property_cases(), 2)),
                         [](const auto& p) { return "Seed" + std::to_string(p.param.seed); });

}  // namespace
}  // namespace keyhole::test
