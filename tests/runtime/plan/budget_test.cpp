// Budgets per head: each head answers as it would in a session where all have its budget.
#include "runtime/plan/budget.h"

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

keyhole_budget budget_of(uint32_t top_k, keyhole_attend_mode attend, float min_weight = 1e-4F) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = top_k;
  b.attend = attend;
  b.min_weight = min_weight;
  return b;
}

keyhole_budget get(const keyhole_session* s, uint32_t layer, uint32_t kv_head) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  EXPECT_OK(keyhole_session_get_budget(s, layer, kv_head, &b));
  return b;
}

void expect_equal(const keyhole_budget& a, const keyhole_budget& b) {
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.attend, b.attend);
  EXPECT_EQ(a.min_weight, b.min_weight);
  EXPECT_EQ(a.tail, b.tail);
  EXPECT_EQ(a.error_target, b.error_target);
  EXPECT_EQ(a.mass_target, b.mass_target);
  EXPECT_EQ(a.min_keys, b.min_keys);
  EXPECT_EQ(a.max_keys, b.max_keys);
}

keyhole_engine_config engine_of(uint32_t kv_heads, uint32_t group, uint32_t threads) {
  keyhole_engine_config c = small_engine(threads);
  c.kv_heads = kv_heads;
  c.q_heads = kv_heads * group;
  return c;
}

class Budgets : public ::testing::TestWithParam<const char*> {
 protected:
  /// A session with tokens of its own seed, built.
  SessionPtr make(const keyhole_engine_config& ec, keyhole_session_config sc, uint32_t n) {
    engine_ = make_engine(ec);
    SessionPtr s = make_session(engine_.get(), sc);
    Numbers numbers(31);
    Model model(ec);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      prefill_both(s.get(), model, Shape(ec), l, n, numbers);
    }
    EXPECT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    return s;
  }
  keyhole_session_config config() const {
    keyhole_session_config c = small_session();
    c.index = GetParam();
    c.max_tokens = 20000;
    return c;
  }

  EnginePtr engine_;
};

TEST_P(Budgets, EachHeadAnswersAsIfAllHadItsBudget) {
  const uint32_t kv_heads = 3;
  const std::vector<keyhole_budget> budgets = {
      budget_of(40, KEYHOLE_ATTEND_TOPK), budget_of(7, KEYHOLE_ATTEND_WEIGHT, 0.01F),
      budget_of(25, KEYHOLE_ATTEND_SCORED), budget_of(3, KEYHOLE_ATTEND_TOPK)};
  const bool graph = std::string(GetParam()).find("M=") != std::string::npos;
  std::vector<uint32_t> groups{17};
  if (graph || !kSanitized) groups.push_back(4);
  if (!kSanitized) groups.insert(groups.end(), {1, 16, 40});
  for (const uint32_t group : groups) {
    for (const uint32_t threads : {group == 4 ? 1U : 7U}) {
      const keyhole_engine_config ec = engine_of(kv_heads, group, threads);
      const Shape shape(ec);
      // Long enough that a search is cut into parts where that can be; graphs take their time to build.
      const SessionPtr session = make(ec, config(), graph ? unless_sanitized(900, 400) : 9000);
      const auto budget_at = [&](uint32_t layer, uint32_t h) {
        return (layer * kv_heads + h) % budgets.size();
      };
      Numbers numbers(5);
      std::vector<std::vector<float>> q;
      for (uint32_t l = 0; l < ec.layers; ++l) q.push_back(numbers.many(shape.q(1)));
      std::vector<std::vector<Answer>> pure;
      for (const keyhole_budget& b : budgets) {
        ASSERT_OK(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &b));
        auto& answers = pure.emplace_back();
        for (uint32_t l = 0; l < ec.layers; ++l) {
          answers.push_back(attend_only(session.get(), shape, l, q[l]));
        }
      }
      for (uint32_t l = 0; l < ec.layers; ++l) {
        for (uint32_t h = 0; h < kv_heads; ++h) {
          ASSERT_OK(keyhole_session_set_budget(session.get(), l, h, &budgets[budget_at(l, h)]));
        }
      }
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const Answer seen = attend_only(session.get(), shape, l, q[l]);
        for (uint32_t h = 0; h < ec.q_heads; ++h) {
          const Answer& expected = pure[budget_at(l, h / group)][l];
          EXPECT_EQ(seen.lse[h], expected.lse[h]);
          for (uint32_t j = 0; j < 64; ++j) {
            ASSERT_EQ(seen.o[h * 64 + j], expected.o[h * 64 + j]) << "head " << h;
          }
        }
      }
    }
  }
}

TEST_P(Budgets, AForkAndAFileKeepThem) {
  const keyhole_engine_config ec = engine_of(2, 2, 2);
  const Shape shape(ec);
  const SessionPtr session = make(ec, config(), 600);
  keyhole_budget one = budget_of(9, KEYHOLE_ATTEND_WEIGHT, 0.02F);
  one.tail = KEYHOLE_TAIL_CENTROID;
  one.min_keys = 3;
  one.max_keys = 70;
  ASSERT_OK(keyhole_session_set_budget(session.get(), 1, 0, &one));
  const keyhole_budget two = budget_of(2, KEYHOLE_ATTEND_TOPK);
  ASSERT_OK(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, 1, &two));

  const std::string path =
      ::testing::TempDir() + "keyhole_budget_" + std::to_string(reinterpret_cast<uintptr_t>(this));
  ASSERT_OK(keyhole_session_save(session.get(), path.c_str()));
  const SessionPtr guard = load_of(engine_.get(), path);
  (void)std::remove(path.c_str());
  const SessionPtr other_guard = fork_of(session.get());
  Numbers numbers(8);
  for (const keyhole_session* copy : {guard.get(), other_guard.get()}) {
    for (uint32_t l = 0; l < 2; ++l) {
      for (uint32_t h = 0; h < 2; ++h) {
        expect_equal(get(copy, l, h), get(session.get(), l, h));
      }
    }
    expect_equal(get(copy, 1, 0), one);
    expect_equal(get(copy, 0, 1), two);
  }
  for (uint32_t l = 0; l < 2; ++l) {
    const auto q = numbers.many(shape.q(1));
    const Answer expected = attend_only(session.get(), shape, l, q);
    EXPECT_EQ(expected.o, attend_only(guard.get(), shape, l, q).o);
    EXPECT_EQ(expected.o, attend_only(other_guard.get(), shape, l, q).o);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Budgets,
                         ::testing::Values("flat", "flat:codec=int8", "ivf:C=16,probe=4",
                                           "hnsw:M=8,ef=30", "roargraph:M=8,ef=16"),
                         [](const auto& p) {
                           std::string name = p.param;
                           for (char& c : name) c = std::isalnum(c) != 0 ? c : '_';
                           return name;
                         });

TEST(Budget, ReadsBackWhatTheSessionBeganWith) {
  const EnginePtr engine = make_engine(small_engine());
  keyhole_session_config c = small_session();
  c.budget.top_k = 77;
  c.budget.attend = KEYHOLE_ATTEND_SCORED;
  c.budget.tail = KEYHOLE_TAIL_SECOND;
  c.budget.error_target = 0.05F;
  c.budget.mass_target = 0.9F;
  c.budget.min_keys = 5;
  c.budget.max_keys = 500;
  const SessionPtr session = make_session(engine.get(), c);
  keyhole_session_config seen;
  keyhole_session_config_init(&seen);
  ASSERT_OK(keyhole_session_get_config(session.get(), &seen));
  EXPECT_EQ(seen.budget.tail, KEYHOLE_TAIL_SECOND);
  EXPECT_EQ(seen.budget.error_target, 0.05F);
  EXPECT_EQ(seen.budget.mass_target, 0.9F);
  EXPECT_EQ(seen.budget.min_keys, 5U);
  EXPECT_EQ(seen.budget.max_keys, 500U);
  EXPECT_EQ(seen.tail_partition, 16U);
  EXPECT_EQ(seen.budgets, nullptr);
  keyhole_budget expected = budget_of(77, KEYHOLE_ATTEND_SCORED, 1e-4F);
  expected.tail = KEYHOLE_TAIL_SECOND;
  expected.error_target = 0.05F;
  expected.mass_target = 0.9F;
  expected.min_keys = 5;
  expected.max_keys = 500;
  expect_equal(get(session.get(), 1, 1), expected);
  expect_equal(get(session.get(), KEYHOLE_ALL, KEYHOLE_ALL), expected);
}

TEST(Budget, SetModeAndSetAttendReachEveryHead) {
  const EnginePtr engine = make_engine(small_engine());
  const SessionPtr session = make_session(engine.get(), small_session());
  const keyhole_budget special = budget_of(5, KEYHOLE_ATTEND_WEIGHT, 0.03F);
  ASSERT_OK(keyhole_session_set_budget(session.get(), 0, 1, &special));
  EXPECT_EQ(get(session.get(), 0, 0).top_k, 4096U);
  ASSERT_OK(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 0));
  EXPECT_EQ(get(session.get(), 0, 1).top_k, 5U);
  ASSERT_OK(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 50));
  for (uint32_t h = 0; h < 2; ++h) EXPECT_EQ(get(session.get(), 0, h).top_k, 50U);
  // 0 keeps every head's own weight.
  ASSERT_OK(keyhole_session_set_attend(session.get(), KEYHOLE_ATTEND_SCORED, 0));
  EXPECT_EQ(get(session.get(), 0, 0).attend, KEYHOLE_ATTEND_SCORED);
  EXPECT_EQ(get(session.get(), 0, 1).attend, KEYHOLE_ATTEND_SCORED);
  EXPECT_EQ(get(session.get(), 0, 0).min_weight, 1e-4F);
  EXPECT_EQ(get(session.get(), 0, 1).min_weight, 0.03F);
  ASSERT_OK(keyhole_session_set_attend(session.get(), KEYHOLE_ATTEND_WEIGHT, 0.5F));
  EXPECT_EQ(get(session.get(), KEYHOLE_ALL, KEYHOLE_ALL).min_weight, 0.5F);
}

TEST(Budget, AllMeansAllOfThem) {
  auto ec = small_engine();
  ec.layers = 3;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), small_session());
  const auto set = [&](uint32_t layer, uint32_t kv_head, uint32_t top_k) {
    const keyhole_budget b = budget_of(top_k, KEYHOLE_ATTEND_TOPK);
    ASSERT_OK(keyhole_session_set_budget(session.get(), layer, kv_head, &b));
  };
  set(KEYHOLE_ALL, KEYHOLE_ALL, 10);
  set(1, KEYHOLE_ALL, 20);
  set(KEYHOLE_ALL, 1, 30);
  const uint32_t expected[3][2] = {{10, 30}, {20, 30}, {10, 30}};
  for (uint32_t l = 0; l < 3; ++l) {
    for (uint32_t h = 0; h < 2; ++h) EXPECT_EQ(get(session.get(), l, h).top_k, expected[l][h]);
  }
  EXPECT_EQ(get(session.get(), KEYHOLE_ALL, 1).top_k, 30U);
  keyhole_budget b;
  keyhole_budget_init(&b);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_get_budget(session.get(), KEYHOLE_ALL, 0, &b));
  // The session's own figures are those that were set for all.
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  ASSERT_OK(keyhole_session_get_config(session.get(), &c));
  EXPECT_EQ(c.budget.top_k, 10U);
}

TEST(Budget, RefusesWhatIsNotAllowedAndKeepsTheOld) {
  const EnginePtr engine = make_engine(small_engine());
  const SessionPtr session = make_session(engine.get(), small_session());
  const keyhole_budget good = budget_of(5, KEYHOLE_ATTEND_TOPK, 0.03F);
  ASSERT_OK(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &good));
  const auto refused = [&](const char* field, auto change) {
    keyhole_budget bad = good;
    bad.top_k = 99;
    change(bad);
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_budget(session.get(), 0, 0, &bad));
    EXPECT_EQ(std::string(keyhole_last_error()).find(field), 0U) << keyhole_last_error();
    EXPECT_EQ(get(session.get(), 0, 0).top_k, 5U);
  };
  refused("top_k", [](auto& b) { b.top_k = 0; });
  refused("top_k", [](auto& b) { b.top_k = (1U << 31) + 1; });
  refused("attend", [](auto& b) { b.attend = 3; });
  refused("min_weight", [](auto& b) { b.min_weight = 1.0F; });
  refused("min_weight", [](auto& b) { b.min_weight = NAN; });
  refused("tail", [](auto& b) { b.tail = 4; });
  refused("tail", [](auto& b) { b.tail = -1; });
  for (const float value : {1.0F, -0.1F, NAN, INFINITY}) {
    refused("error_target", [&](auto& b) { b.error_target = value; });
    refused("mass_target", [&](auto& b) { b.mass_target = value; });
  }
  refused("min_keys", [](auto& b) {
    b.min_keys = 5;
    b.max_keys = 4;
  });
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_budget(session.get(), 2, 0, &good));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_budget(session.get(), 0, 2, &good));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_budget(session.get(), 0, 0, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_get_budget(session.get(), 0, 0, nullptr));
  for (const uint32_t partition : {1U, 3U, 1025U}) {
    keyhole_session_config c = small_session();
    c.tail_partition = partition;
    keyhole_session* s = nullptr;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine.get(), &c, &s));
    EXPECT_EQ(std::string(keyhole_last_error()).find("tail_partition"), 0U);
  }
}

}  // namespace
}  // namespace keyhole::test
