// Tails and targets in a session's steps: against the truth, and the same whatever way a state was reached.
#include <cstdio>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// Tokens whose keys lie around a few directions, so that means have something to say, and queries near them.
class Sequence {
 public:
  Sequence(const keyhole_engine_config& c, uint64_t seed) : shape_(c), config_(c), numbers_(seed) {
    for (int i = 0; i < 8; ++i) {
      centers_.push_back(numbers_.many(static_cast<size_t>(c.head_dim)));
    }
  }

  std::vector<float> keys(uint32_t n) {
    std::vector<float> k;
    for (uint32_t i = 0; i < n * config_.kv_heads; ++i) {
      const auto& center = centers_[numbers_.below(8)];
      for (const float x : center) k.push_back(x * 0.5F + numbers_.next() / 8.0F);
    }
    return k;
  }
  std::vector<float> values(uint32_t n) { return numbers_.many(shape_.kv(n)); }
  std::vector<float> query() {
    std::vector<float> q;
    for (uint32_t h = 0; h < config_.q_heads; ++h) {
      const auto& center = centers_[numbers_.below(8)];
      for (const float x : center) q.push_back(x * 0.25F + numbers_.next() / 8.0F);
    }
    return q;
  }

 private:
  Shape shape_;
  keyhole_engine_config config_;
  Numbers numbers_;
  std::vector<std::vector<float>> centers_;
};

class Tails : public ::testing::TestWithParam<const char*> {
 protected:
  static keyhole_session_config config() {
    keyhole_session_config c = small_session();
    c.max_tokens = 20000;
    c.index = GetParam();
    c.budget.top_k = 20;
    c.budget.tail = KEYHOLE_TAIL_SECOND;
    c.tail_partition = 8;
    return c;
  }

  static void prefill(keyhole_session* s, Model& model, const keyhole_engine_config& ec,
                      Sequence& tokens, uint32_t n) {
    const Shape shape(ec);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto k = tokens.keys(n);
      const auto v = tokens.values(n);
      const auto tk = tensor(k, {n, shape.hkv, shape.d});
      const auto tv = tensor(v, {n, shape.hkv, shape.d});
      ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, nullptr));
      model.append(l, k, v);
    }
  }

  /// A session of `n` tokens with an index of them, and what it is to answer.
  struct Built {
    Built(const keyhole_session_config& c, uint32_t n,
          const keyhole_engine_config& config = small_engine())
        : ec(config), engine(make_engine(ec)), session(make_session(engine.get(), c)) {
      prefill(get(), model, ec, tokens, n);
      EXPECT_OK(keyhole_session_build(get(), nullptr, nullptr));
    }
    keyhole_session* get() const { return session.get(); }
    void set_budget(const keyhole_budget& b) const {
      ASSERT_OK(keyhole_session_set_budget(get(), KEYHOLE_ALL, KEYHOLE_ALL, &b));
    }

    keyhole_engine_config ec;
    EnginePtr engine;
    SessionPtr session;
    Model model{ec};
    Sequence tokens{ec, 7};
  };

  static void step(keyhole_session* s, Model* model, const keyhole_engine_config& ec,
                   Sequence& tokens) {
    const Shape shape(ec);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto k = tokens.keys(1);
      const auto v = tokens.values(1);
      const auto q = tokens.query();
      std::vector<float> o(shape.q(1));
      const auto tk = tensor(k, {shape.hkv, shape.d});
      const auto tv = tensor(v, {shape.hkv, shape.d});
      const auto tq = tensor(q, {shape.hq, shape.d});
      const auto out = tensor(o, {shape.hq, shape.d});
      ASSERT_OK(keyhole_session_attend(s, l, &tq, &tk, &tv, &out, nullptr));
      if (model != nullptr) model->append(l, k, v);
    }
  }

  /// Mean output error of some queries of layer 0.
  static double error(keyhole_session* s, const Model& model, const keyhole_engine_config& ec,
                      uint64_t seed) {
    Sequence queries(ec, 7);  // of the centres that the keys have
    Numbers salt(seed);
    const Shape shape(ec);
    double sum = 0.0;
    for (int i = 0; i < 16; ++i) {
      auto q = queries.query();
      for (float& x : q) x += salt.next() / 32.0F;
      std::vector<double> lse;
      const auto truth = model.attend_all(0, q, lse);
      const Answer seen = attend_only(s, shape, 0, q);
      double off = 0.0;
      double all = 0.0;
      for (size_t j = 0; j < truth.size(); ++j) {
        off += (seen.o[j] - truth[j]) * (seen.o[j] - truth[j]);
        all += truth[j] * truth[j];
      }
      sum += std::sqrt(off / all) / 16;
    }
    return sum;
  }

  static std::vector<Answer> answers(keyhole_session* s, const keyhole_engine_config& ec) {
    Sequence queries(ec, 7);
    std::vector<Answer> all;
    for (int i = 0; i < 5; ++i) all.push_back(attend_only(s, Shape(ec), i % 2, queries.query()));
    return all;
  }
  static void expect_same(const std::vector<Answer>& a, const std::vector<Answer>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].o, b[i].o);
      EXPECT_EQ(a[i].lse, b[i].lse);
    }
  }
};

TEST_P(Tails, ComeNearerToTheTruthThanNothing) {
  KEYHOLE_SKIP_WITH_TSAN();
  Built s(config(), 3000);
  EXPECT_GT(statistics(s.get()).tail_bytes, 0U);

  double errors[4];
  for (const keyhole_tail_mode tail :
       {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_MEAN, KEYHOLE_TAIL_CENTROID, KEYHOLE_TAIL_SECOND}) {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = 20;
    b.tail = tail;
    s.set_budget(b);
    errors[tail] = error(s.get(), s.model, s.ec, 1);
  }
  EXPECT_LT(errors[KEYHOLE_TAIL_SECOND], 0.5 * errors[KEYHOLE_TAIL_NONE]);
  EXPECT_LT(errors[KEYHOLE_TAIL_CENTROID], errors[KEYHOLE_TAIL_NONE]);
  EXPECT_LT(errors[KEYHOLE_TAIL_SECOND], errors[KEYHOLE_TAIL_MEAN]);
}

TEST_P(Tails, TargetsAreMet) {
  KEYHOLE_SKIP_WITH_TSAN();
  Built s(config(), 3000);
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = 10;
  b.tail = KEYHOLE_TAIL_SECOND;
  b.max_keys = 3000;
  for (const float target : {0.2F, 0.05F, 0.02F}) {
    b.error_target = target;
    s.set_budget(b);
    double found = 0.0;
    for (const uint64_t seed : {2U, 3U, 4U}) found += error(s.get(), s.model, s.ec, seed) / 3.0;
    EXPECT_LT(found, 1.5 * target) << found;
  }
  EXPECT_GT(statistics(s.get()).keys_opened, 0U);
  EXPECT_EQ(statistics(s.get()).targets_missed, 0U);
  // All of the mass is all of the keys.
  b.error_target = 0;
  b.mass_target = 0.999999F;
  b.tail = KEYHOLE_TAIL_NONE;
  s.set_budget(b);
  EXPECT_LT(error(s.get(), s.model, s.ec, 3), 1e-3);
  // A cap that is too low is kept, and reported.
  ASSERT_OK(keyhole_session_reset_statistics(s.get()));
  b.max_keys = 50;
  b.min_keys = 0;
  s.set_budget(b);
  (void)error(s.get(), s.model, s.ec, 4);
  const auto stats = statistics(s.get());
  EXPECT_GT(stats.targets_missed, 0U);
  EXPECT_LE(stats.keys_opened, stats.attends * s.ec.kv_heads * 50);
}

TEST_P(Tails, WithoutASearchPartitionsAloneAreRead) {
  KEYHOLE_SKIP_WITH_TSAN();
  Built s(config(), 3000);
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.attend = KEYHOLE_ATTEND_NONE;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_set_budget(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &b));
  b.tail = KEYHOLE_TAIL_SECOND;
  b.min_keys = 200;
  s.set_budget(b);
  const double some = error(s.get(), s.model, s.ec, 5);
  EXPECT_EQ(statistics(s.get()).keys_scored, 0U);
  b.min_keys = 3000;
  s.set_budget(b);
  EXPECT_LT(error(s.get(), s.model, s.ec, 5), 1e-3);
  EXPECT_GT(some, 1e-3);
}

TEST_P(Tails, AreTheSameForAnyNumberOfThreads) {
  std::vector<Answer> first;
  for (const uint32_t threads : {1U, 2U, 4U}) {
    auto sc = config();
    sc.budget.error_target = 0.05F;
    Built s(sc, 2000, small_engine(threads));
    for (uint32_t i = 0; i < unless_sanitized(150, 30); ++i) step(s.get(), nullptr, s.ec, s.tokens);
    const auto all = answers(s.get(), s.ec);
    if (first.empty()) first = all;
    expect_same(first, all);
  }
}

TEST_P(Tails, SurviveSavingAndForkingAndTruncation) {
  Built s(config(), 2500);
  for (int i = 0; i < 100; ++i) step(s.get(), &s.model, s.ec, s.tokens);
  const auto before = answers(s.get(), s.ec);

  const SessionPtr fork = fork_of(s.get());
  expect_same(before, answers(fork.get(), s.ec));
  const TemporaryFolder folder;
  const std::string path = folder.path() / "session";
  ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
  const SessionPtr load = load_of(s.engine.get(), path);
  expect_same(before, answers(load.get(), s.ec));
  EXPECT_EQ(statistics(s.get()).tail_bytes, statistics(load.get()).tail_bytes);

  // Tokens that are gone weigh nothing: with a tail and with all keys read.
  ASSERT_OK(keyhole_session_truncate(s.get(), 1500));
  s.model.truncate(1500);
  EXPECT_LT(error(s.get(), s.model, s.ec, 6), 0.2);
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.min_keys = 3000;
  b.tail = KEYHOLE_TAIL_SECOND;
  s.set_budget(b);
  EXPECT_LT(error(s.get(), s.model, s.ec, 6), 1e-3);
}

TEST(TailsOfACopy, OfManySmallBlocksAreSearchedLikeTheOthers) {
  // Layer 1 has fewer rows than layer 0, and more partitions, as each block brings its own.
  const auto ec = small_engine();
  const auto engine = make_engine(ec);
  keyhole_session_config c = small_session();
  c.budget.top_k = 20;
  c.budget.tail = KEYHOLE_TAIL_SECOND;
  c.tail_partition = 64;
  c.append_block = 8;
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  const auto s = make_session(engine.get(), c);
  const Shape shape(ec);
  Model model(ec);
  Numbers numbers(17);
  prefill_both(s.get(), model, shape, 0, 1000, numbers);
  prefill_both(s.get(), model, shape, 1, 100, numbers);
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  for (int i = 0; i < 800; ++i) {
    const auto k = numbers.many(shape.kv(1)), v = numbers.many(shape.kv(1)),
               q = numbers.many(shape.q(1));
    std::vector<float> o(shape.q(1));
    const auto tk = tensor(k, {shape.hkv, shape.d}), tv = tensor(v, {shape.hkv, shape.d}),
               tq = tensor(q, {shape.hq, shape.d}), out = tensor(o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend(s.get(), 1, &tq, &tk, &tv, &out, nullptr));
  }
  const SessionPtr fork = fork_of(s.get());
  for (keyhole_session* session : {s.get(), fork.get()}) {
    EXPECT_GT(layer_tokens(session, 1).indexed, 800U);
    ASSERT_OK(keyhole_session_reset_statistics(session));
    (void)attend_only(session, shape, 1, numbers.many(shape.q(1)));
    EXPECT_LT(statistics(session).keys_attended, ec.q_heads * 200U);
  }
}

TEST_P(Tails, AskedForLateAreBuiltByTheNextBuild) {
  KEYHOLE_SKIP_WITH_TSAN();
  auto sc = config();
  sc.budget.tail = KEYHOLE_TAIL_NONE;
  Built s(sc, 2500);
  EXPECT_EQ(statistics(s.get()).tail_bytes, 0U);
  const auto without = answers(s.get(), s.ec);
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = 20;
  b.tail = KEYHOLE_TAIL_SECOND;
  s.set_budget(b);
  expect_same(without, answers(s.get(), s.ec));
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  EXPECT_GT(statistics(s.get()).tail_bytes, 0U);
  EXPECT_LT(error(s.get(), s.model, s.ec, 8), 0.25);
}

// With all components SparQ's approximate scores are the scores, and its alpha the true share.
TEST(TailOfSparq, HasTheMassThatItsSearchFoundMissing) {
  const auto ec = small_engine();
  const auto engine = make_engine(ec);
  auto sc = small_session();
  sc.index = "sparq:r=64";
  sc.budget.top_k = 20;
  sc.budget.tail = KEYHOLE_TAIL_MEAN;
  const auto s = make_session(engine.get(), sc);
  Model model(ec);
  Numbers numbers(5);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l) {
    prefill_both(s.get(), model, shape, l, 1500, numbers);
  }
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  for (int i = 0; i < 8; ++i) {
    auto q = numbers.many(shape.q(1));
    for (float& x : q) x *= 0.1F;
    std::vector<double> lse;
    (void)model.attend_all(0, q, lse);
    const Answer seen = attend_only(s.get(), shape, 0, q);
    for (size_t h = 0; h < lse.size(); ++h) EXPECT_NEAR(seen.lse[h], lse[h], 2e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Tails,
                         testing::Values("flat", "ivf:C=40,probe=4",
                                         "roargraph:M=6,ef=32,Nq=10,beam=12"));

}  // namespace
}  // namespace keyhole::test
