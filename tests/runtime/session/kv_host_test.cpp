// Sessions whose offloaded K and V lie in int8: against a quantiser of the test's own, and against sessions that were
// given what the int8 numbers stand for.
#include <filesystem>
#include <limits>
#include <random>

#include "keyhole/save.h"
#include "tests/normal.h"
#include "tests/runtime/stored_model.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

// Fewer under sanitizers, which take ten times as long.
#ifdef KEYHOLE_SANITIZED
constexpr int kOperations = 5;
#else
constexpr int kOperations = 12;
#endif

keyhole_session_config in_int8() {
  keyhole_session_config c = small_session();
  c.max_tokens = 6000;
  c.flush_block = KEYHOLE_AUTO;
  c.budget.top_k = 6000;
  c.kv_host = KEYHOLE_KV_HOST_INT8;
  return c;
}

void step_both(keyhole_session* s, StoredModel& m, const keyhole_engine_config& ec,
               Numbers& numbers) {
  const Shape shape(ec);
  std::vector<Answer> answers;
  std::vector<std::vector<float>> queries;
  for (uint32_t l = 0; l < ec.layers; ++l) {
    const auto k = numbers.many(shape.kv(1));
    const auto v = numbers.many(shape.kv(1));
    queries.push_back(numbers.many(shape.q(1)));
    m.append(l, k, v);
    answers.push_back({std::vector<float>(shape.q(1)), std::vector<float>(ec.q_heads)});
    const auto tk = tensor(k, {shape.hkv, shape.d});
    const auto tv = tensor(v, {shape.hkv, shape.d});
    const auto tq = tensor(queries.back(), {shape.hq, shape.d});
    const auto out = tensor(answers.back().o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend(s, l, &tq, &tk, &tv, &out, answers.back().lse.data()));
  }
  m.follow(s);
  for (uint32_t l = 0; l < ec.layers; ++l) {
    std::vector<double> lse;
    const auto o = m.attend_all(l, queries[l], lse);
    expect_near(answers[l], o, lse, 2e-4);
  }
}

SessionPtr reloaded(keyhole_engine* engine, keyhole_session* s, const std::string& path) {
  EXPECT_OK(keyhole_session_save(s, path.c_str()));
  return load_of(engine, path);
}

struct Int8Case {
  uint64_t seed;
  const char* index;
  keyhole_mode mode;
  keyhole_dtype dtype;
};

class KvHostInt8 : public ::testing::TestWithParam<Int8Case> {
 protected:
  TemporaryFolder folder_;
};

// With k above the number of tokens every index type attends all rows exactly: as int8 has them.
TEST_P(KvHostInt8, EveryTokenIsAttendedOnceAfterEveryOperation) {
  const Int8Case param = GetParam();
  Numbers numbers(param.seed);
  auto ec = small_engine(1 + numbers.below(3));
  ec.head_dim = some_head_dim(param.seed);
  ec.kv_heads = 1 + numbers.below(2);
  ec.q_heads = ec.kv_heads * (1 + numbers.below(5));
  ec.kv_dtype = param.dtype;
  ec.scale = 0.05F;
  auto sc = in_int8();
  sc.index = param.index;
  sc.mode = param.mode;
  sc.sink = numbers.below(9);
  sc.window = 1 + numbers.below(300);
  sc.append_block = 64 + numbers.below(400);
  sc.append_mode = param.seed % 2 == 0 ? KEYHOLE_APPEND_IN_STEP : KEYHOLE_APPEND_BACKGROUND;
  const EnginePtr engine = make_engine(ec);
  SessionPtr session = make_session(engine.get(), sc);
  ASSERT_NE(session, nullptr);
  StoredModel m(ec, KEYHOLE_KV_HOST_INT8);
  const Shape shape(ec);
  uint32_t most_rows = 0;
  for (int i = 0; i < kOperations; ++i) {
    const uint32_t operation = i == 0 ? 0 : numbers.below(10);
    SCOPED_TRACE("seed " + std::to_string(param.seed) + ", operation " + std::to_string(i) + ": " +
                 std::to_string(operation));
    if (operation < 3 && m.tokens(0) < 3000) {
      const uint32_t n = (i == 0 ? 700 : 200) + numbers.below(700);
      for (uint32_t l = 0; l < ec.layers; ++l) prefill_both(session.get(), m, shape, l, n, numbers);
      m.follow(session.get());
    } else if (operation < 6) {
      const uint32_t steps = 1 + numbers.below(40);
      for (uint32_t t = 0; t < steps; ++t) step_both(session.get(), m, ec, numbers);
    } else if (operation == 6) {
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    } else if (operation == 7) {
      session = numbers.below(2) == 0
                    ? fork_of(session.get())
                    : reloaded(engine.get(), session.get(), (folder_ / "session").string());
      ASSERT_NE(session, nullptr);
    } else {
      const uint32_t n = m.tokens(0) / 2 + numbers.below(m.tokens(0) / 2 + 1);
      ASSERT_OK(keyhole_session_truncate(session.get(), n));
      m.truncate(n);
      m.follow(session.get());
    }
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(session.get(), l);
      ASSERT_EQ(t.total, m.tokens(l));
      const auto q = numbers.many(shape.q(1));
      std::vector<double> lse;
      const auto o = m.attend_all(l, q, lse);
      expect_near(attend_only(session.get(), shape, l, q), o, lse, 2e-4);
    }
    most_rows = std::max(most_rows, m.rows(0));
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(most_rows, kInt8Block);
}

std::vector<Int8Case> int8_cases() {
  std::vector<Int8Case> all;
  uint64_t seed = 1;
  for (const keyhole_dtype t : {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16}) {
    for (int i = 0; i < 2; ++i) all.push_back({seed++, "flat", KEYHOLE_MODE_EXACT, t});
    for (const char* index : {"flat", "flat:codec=int8", "ivf:C=4,probe=16777216", "hnsw",
                              "roargraph", "sparq", "saap:C=4,probe=16777216", "codes:k=4,v=4"}) {
      all.push_back({seed++, index, KEYHOLE_MODE_INDEXED, t});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Random, KvHostInt8, ::testing::ValuesIn(unless_sanitized(int8_cases(), 5)),
                         [](const auto& p) { return "Seed" + std::to_string(p.param.seed); });

// ---- Indexes and tails --------------------------------------------------------------------------

struct KvWay {
  const char* index;
  keyhole_attend_mode attend;
  keyhole_tail_mode tail;
};

class OfWhatInt8StandsFor : public ::testing::TestWithParam<KvWay> {};

// A session in fp32 that is given what int8 makes of the tokens that leave the window holds the same numbers: whatever
// is built of them, and whatever steps read, is the same, bit for bit.
TEST_P(OfWhatInt8StandsFor, AnIndexIsTheSame) {
  KEYHOLE_SKIP_WITH_TSAN();
  auto ec = small_engine(2);
  ec.kv_dtype = KEYHOLE_F32;
  const Shape shape(ec);
  auto sc = in_int8();
  sc.index = GetParam().index;
  sc.budget.attend = GetParam().attend;
  sc.budget.tail = GetParam().tail;
  sc.budget.min_keys = sc.budget.tail == KEYHOLE_TAIL_NONE ? 0 : 40;
  sc.budget.top_k = 20;
  sc.budget.min_weight = 1e-3F;
  sc.tail_partition = 8;
  sc.append_block = 64;
  sc.append_mode = KEYHOLE_APPEND_IN_STEP;
  sc.training_queries = 200;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr int8 = make_session(engine.get(), sc);
  sc.kv_host = KEYHOLE_KV_HOST_SAME;
  sc.flush_block = kInt8Block;
  const SessionPtr same = make_session(engine.get(), sc);
  ASSERT_NE(int8, nullptr);
  ASSERT_NE(same, nullptr);

  Numbers numbers(5);
  // What leaves the window with the first prefill, and with a second one after the build.
  constexpr uint32_t kFirst = unless_sanitized(1500, 700), kSecond = unless_sanitized(700, 400);
  const uint32_t kept = sc.sink + sc.window;
  const uint32_t first_rows = (kFirst - kept) / kInt8Block * kInt8Block;
  const uint32_t rows = (kFirst + kSecond - kept) / kInt8Block * kInt8Block;
  for (uint32_t l = 0; l < ec.layers; ++l) {
    auto k = numbers.many(shape.kv(kFirst + kSecond));
    auto v = numbers.many(shape.kv(kFirst + kSecond));
    const auto q = numbers.many(shape.q(kFirst + kSecond));
    // Channels far apart, and a channel of zeros.
    for (size_t i = 0; i < k.size(); ++i) {
      if (i % shape.d == 3) k[i] *= 64.0F;
      if (i % shape.d == 9) k[i] = v[i] = 0.0F;
    }
    for (const bool is_int8 : {true, false}) {
      if (!is_int8) {
        for (uint32_t row = 0; row < rows; row += kInt8Block) {
          quantise(k, sc.sink + row, shape.kv(1));
          quantise(v, sc.sink + row, shape.kv(1));
        }
      }
      const auto give = [&](uint32_t begin, uint32_t n) {
        const auto part = [&](const std::vector<float>& x, size_t width) {
          return std::vector<float>(x.begin() + static_cast<ptrdiff_t>(begin * width),
                                    x.begin() + static_cast<ptrdiff_t>((begin + n) * width));
        };
        const auto pk = part(k, shape.kv(1)), pv = part(v, shape.kv(1)), pq = part(q, shape.q(1));
        const auto tk = tensor(pk, {n, shape.hkv, shape.d});
        const auto tv = tensor(pv, {n, shape.hkv, shape.d});
        const auto tq = tensor(pq, {n, shape.hq, shape.d});
        keyhole_session* s = is_int8 ? int8.get() : same.get();
        ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
      };
      give(0, kFirst);
      if (l + 1 == ec.layers) {
        ASSERT_OK(keyhole_session_build(is_int8 ? int8.get() : same.get(), nullptr, nullptr));
      }
      give(kFirst, kSecond);
    }
  }
  const auto expect_same = [&](uint32_t expected_rows) {
    for (uint32_t l = 0; l < ec.layers; ++l) {
      for (int i = 0; i < 3; ++i) {
        auto q = numbers.many(shape.q(1));
        for (size_t j = 3; j < q.size(); j += static_cast<size_t>(shape.d)) q[j] /= 64.0F;
        // Steps take pending rows in, a block at a time.
        const Answer a = attend_only(int8.get(), shape, l, q);
        const Answer b = attend_only(same.get(), shape, l, q);
        ASSERT_EQ(a.o, b.o);
        ASSERT_EQ(a.lse, b.lse);
      }
      const auto t = layer_tokens(int8.get(), l);
      EXPECT_EQ(t.total - t.sink - t.window, expected_rows);
      EXPECT_EQ(t.indexed, layer_tokens(same.get(), l).indexed);
    }
  };
  expect_same(rows);
  EXPECT_GT(layer_tokens(int8.get(), 0).indexed, 0U);
  ASSERT_OK(keyhole_session_build(int8.get(), nullptr, nullptr));
  ASSERT_OK(keyhole_session_build(same.get(), nullptr, nullptr));
  expect_same(rows);
  // Not within a block: fp32 takes what came back from int8 as it is.
  const uint32_t cut = sc.sink + first_rows - kInt8Block + 100;
  ASSERT_OK(keyhole_session_truncate(int8.get(), cut));
  ASSERT_OK(keyhole_session_truncate(same.get(), cut));
  expect_same(first_rows - kInt8Block);
}

std::vector<KvWay> ways() {
  std::vector<KvWay> all;
  for (const char* index :
       {"flat", "flat:codec=int8", "ivf:C=16,probe=4", "ivf:C=16,probe=4,codec=int8", "hnsw",
        "roargraph", "roargraph:codec=int8", "sparq", "sparq:codec=int8", "saap:C=16,probe=4",
        "codes:k=2,v=2"}) {
    for (const keyhole_attend_mode attend :
         {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED, KEYHOLE_ATTEND_WEIGHT}) {
      all.push_back({index, attend, KEYHOLE_TAIL_NONE});
    }
  }
  for (const keyhole_tail_mode tail :
       {KEYHOLE_TAIL_MEAN, KEYHOLE_TAIL_CENTROID, KEYHOLE_TAIL_SECOND}) {
    all.push_back({"ivf:C=16,probe=4", KEYHOLE_ATTEND_TOPK, tail});
    all.push_back({"flat", KEYHOLE_ATTEND_NONE, tail});
  }
  for (const char* codes : {"codes:k=1,v=0", "codes:k=2,v=2", "codes:k=4,v=4"}) {
    all.push_back({codes, KEYHOLE_ATTEND_TOPK, KEYHOLE_TAIL_CODES});
    all.push_back({codes, KEYHOLE_ATTEND_NONE, KEYHOLE_TAIL_CODES});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ways, OfWhatInt8StandsFor,
                         ::testing::ValuesIn(unless_sanitized(ways(), 6)),
                         [](const auto& p) { return "Way" + std::to_string(p.index); });

// ---- Error, bytes, settings ---------------------------------------------------------------------

/// Normal numbers, fitting for fp16.
std::vector<float> normal(std::mt19937_64& rng, size_t n) {
  keyhole::test::Normal<float> d;
  std::vector<float> x(n);
  for (float& e : x) e = rounded_to(d(rng), KEYHOLE_F16);
  return x;
}

TEST(KvHost, Int8IsNearExactAttentionWithOutlierChannelsToo) {
  KEYHOLE_SKIP_WITH_TSAN();
  auto ec = small_engine();
  ec.head_dim = 128;
  ec.kv_dtype = KEYHOLE_F16;
  const Shape shape(ec);
  for (const float outlier : {1.0F, 64.0F}) {
    auto sc = in_int8();
    sc.mode = KEYHOLE_MODE_EXACT;
    const EnginePtr engine = make_engine(ec);
    const SessionPtr session = make_session(engine.get(), sc);
    Model model(ec);
    std::mt19937_64 rng(7);
    const auto d = static_cast<size_t>(shape.d);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      constexpr uint32_t kTokens = 3000;
      auto k = normal(rng, shape.kv(kTokens));
      const auto v = normal(rng, shape.kv(kTokens));
      for (size_t i = 0; i < k.size(); ++i) {
        if (i % d % 20 == 5) k[i] *= outlier;
      }
      const auto tk = tensor(k, {kTokens, shape.hkv, shape.d});
      const auto tv = tensor(v, {kTokens, shape.hkv, shape.d});
      ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, nullptr));
      model.append(l, k, v);
    }
    double squares = 0.0, norms = 0.0;
    for (int i = 0; i < 20; ++i) {
      auto q = normal(rng, shape.q(1));
      for (size_t j = 0; j < q.size(); ++j) {
        q[j] *= 2.0F;
        if (j % d % 20 == 5) q[j] /= outlier;
      }
      std::vector<double> lse;
      const auto o = model.attend_all(0, q, lse);
      const Answer seen = attend_only(session.get(), shape, 0, q);
      for (size_t j = 0; j < o.size(); ++j) {
        squares += (seen.o[j] - o[j]) * (seen.o[j] - o[j]);
        norms += o[j] * o[j];
      }
    }
    const double error = std::sqrt(squares / norms);
    EXPECT_LT(error, 0.02) << "outlier " << outlier;
    EXPECT_GT(error, 1e-3) << "nothing was quantised";
  }
}

TEST(KvHost, NumbersAtTheEndsOfTheirDtypeStayFinite) {
  KEYHOLE_SKIP_WITH_TSAN();
  struct End {
    keyhole_dtype dtype;
    float most;
  };
  for (const End end : {End{KEYHOLE_F16, 65504.0F}, End{KEYHOLE_BF16, 0x1.FEp127F},
                        End{KEYHOLE_F32, std::numeric_limits<float>::max()}}) {
    auto ec = small_engine();
    ec.kv_dtype = end.dtype;
    ec.scale = 1e-3F;
    const Shape shape(ec);
    auto sc = in_int8();
    const EnginePtr engine = make_engine(ec);
    for (const char* index : {"flat", "ivf:C=8,probe=8", "hnsw", "roargraph", "sparq", "codes"}) {
      sc.index = index;
      sc.budget.top_k = 30;
      const SessionPtr session = make_session(engine.get(), sc);
      Numbers numbers(3);
      constexpr uint32_t kTokens = unless_sanitized(900, 450);
      for (uint32_t l = 0; l < ec.layers; ++l) {
        auto k = numbers.many(shape.kv(kTokens));
        auto v = numbers.many(shape.kv(kTokens));
        const auto q = numbers.many(shape.q(kTokens));
        for (size_t i = 0; i < k.size(); ++i) {
          if (i % shape.d == 1) k[i] = i % 3 == 0 ? end.most : -end.most;
          if (i % shape.d == 2) v[i] = i % 2 == 0 ? end.most : -end.most * 0.998F;
          if (i % shape.d == 3) k[i] = v[i] = 0.0F;
        }
        const auto tk = tensor(k, {kTokens, shape.hkv, shape.d});
        const auto tv = tensor(v, {kTokens, shape.hkv, shape.d});
        const auto tq = tensor(q, {kTokens, shape.hq, shape.d});
        ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, &tq));
      }
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      const auto expect_finite = [&] {
        const Answer a = attend_only(session.get(), shape, 0, numbers.many(shape.q(1)));
        for (const float x : a.o) ASSERT_TRUE(std::isfinite(x)) << index;
        for (const float x : a.lse) ASSERT_TRUE(std::isfinite(x)) << index;
      };
      expect_finite();
      ASSERT_OK(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_EXACT, 0));
      expect_finite();
      ASSERT_OK(keyhole_session_truncate(session.get(), kTokens - 200));  // within a block
      expect_finite();
    }
  }
}

keyhole_memory_plan plan(const keyhole_engine_config& e, const keyhole_session_config& s,
                         uint64_t context) {
  keyhole_memory_plan p;
  keyhole_memory_plan_init(&p);
  EXPECT_OK(keyhole_plan(&e, &s, context, 0, 0, &p));
  return p;
}

TEST(KvHost, Int8TakesTheBytesThatThePlanForesees) {
  for (const keyhole_dtype dtype : {KEYHOLE_F16, KEYHOLE_F32}) {
    auto ec = small_engine();
    ec.kv_dtype = dtype;
    const Shape shape(ec);
    auto sc = in_int8();
    sc.mode = KEYHOLE_MODE_EXACT;
    const EnginePtr engine = make_engine(ec);
    constexpr uint32_t kInt8Blocks = 9;
    const uint32_t tokens = sc.sink + sc.window + kInt8Blocks * kInt8Block;
    keyhole_statistics seen[2];
    keyhole_memory_plan planned[2];
    for (const keyhole_kv_host how : {KEYHOLE_KV_HOST_SAME, KEYHOLE_KV_HOST_INT8}) {
      sc.kv_host = how;
      sc.flush_block = kInt8Block;
      const SessionPtr session = make_session(engine.get(), sc);
      Model model(ec);
      Numbers numbers(4);
      for (uint32_t l = 0; l < ec.layers; ++l)
        prefill_both(session.get(), model, shape, l, tokens, numbers);
      seen[how] = statistics(session.get());
      planned[how] = plan(ec, sc, tokens);
    }
    const uint64_t numbers_of_row = uint64_t{2} * ec.layers * shape.kv(1);
    const uint64_t width = dtype == KEYHOLE_F16 ? 2 : 4;
    const uint64_t saved = numbers_of_row * kInt8Blocks * (kInt8Block * (width - 1) - 2);
    EXPECT_EQ(seen[0].host_bytes - seen[1].host_bytes, saved);
    EXPECT_EQ(planned[0].host_bytes - planned[1].host_bytes, saved);
  }
}

TEST(KvHost, AMillionTokensOfAn8BModelFitInto128GiBBesideTheirCodesOnTheDevice) {
  keyhole_engine_config e;
  keyhole_engine_config_init(&e);
  e.layers = 32;
  e.q_heads = 32;
  e.kv_heads = 8;
  e.head_dim = 128;
  keyhole_session_config s;
  keyhole_session_config_init(&s);
  s.max_tokens = 1 << 20;
  const uint64_t gib = uint64_t{1} << 30;
  EXPECT_GT(plan(e, s, s.max_tokens).host_bytes, 128 * gib);
  s.kv_host = KEYHOLE_KV_HOST_INT8;
  const auto p = plan(e, s, s.max_tokens);
  EXPECT_LT(p.host_bytes, 66 * gib);
  EXPECT_GT(p.host_bytes, 64 * gib);
  EXPECT_GT(p.pinned_kv_bytes, 64 * gib * 99 / 100);
  EXPECT_LT(p.pinned_kv_bytes, 65 * gib);
}

TEST(KvHost, Int8NeedsWholeBlocksOfTokens) {
  const EnginePtr engine = make_engine(small_engine());
  auto sc = in_int8();
  const auto read_back = [](const keyhole_session* s) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(s, &c));
    return c;
  };
  EXPECT_EQ(read_back(make_session(engine.get(), sc).get()).flush_block, kInt8Block);
  EXPECT_EQ(read_back(make_session(engine.get(), sc).get()).kv_host, KEYHOLE_KV_HOST_INT8);
  sc.flush_block = 512;
  EXPECT_EQ(read_back(make_session(engine.get(), sc).get()).flush_block, 512U);
  sc.flush_block = 64;
  keyhole_session* s = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine.get(), &sc, &s));
  const std::string text = keyhole_last_error();
  for (const char* part : {"flush_block is 64", "kv_host int8", "multiples of 256"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  sc.kv_host = 7;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine.get(), &sc, &s));
  sc.kv_host = KEYHOLE_KV_HOST_SAME;
  EXPECT_EQ(read_back(make_session(engine.get(), sc).get()).flush_block, 64U);
}

}  // namespace
}  // namespace keyhole::test
