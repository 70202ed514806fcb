// Sessions whose steps attend every offloaded row by its code but the heaviest, which they attend exactly.
#include <algorithm>
#include <filesystem>

#include "tests/relative_error.h"
#include "tests/runtime/session/members.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

keyhole_session_config with_codes(const char* index, uint32_t rows) {
  keyhole_session_config c = small_session();
  c.max_tokens = 20000;
  c.append_block = 300;
  c.index = index;
  c.budget.top_k = rows;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  return c;
}

void step(keyhole_session* s, Model& model, const Shape& shape, uint32_t layers, Numbers& numbers,
          float key_size) {
  for (uint32_t l = 0; l < layers; ++l) {
    auto k = numbers.many(shape.kv(1));
    for (float& x : k) x *= key_size;
    const auto v = numbers.many(shape.kv(1));
    const auto q = numbers.many(shape.q(1));
    std::vector<float> o(shape.q(1));
    const auto tk = tensor(k, {shape.hkv, shape.d});
    const auto tv = tensor(v, {shape.hkv, shape.d});
    const auto tq = tensor(q, {shape.hq, shape.d});
    const auto out = tensor(o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend(s, l, &tq, &tk, &tv, &out, nullptr));
    model.append(l, k, v);
  }
}

void prefill(keyhole_session* s, Model& model, const Shape& shape, uint32_t layers, uint32_t n,
             Numbers& numbers, float key_size) {
  for (uint32_t l = 0; l < layers; ++l) {
    auto k = numbers.many(shape.kv(n));
    for (float& x : k) x *= key_size;
    const auto v = numbers.many(shape.kv(n));
    const auto q = numbers.many(shape.q(n));
    const auto tk = tensor(k, {n, shape.hkv, shape.d});
    const auto tv = tensor(v, {n, shape.hkv, shape.d});
    const auto tq = tensor(q, {n, shape.hq, shape.d});
    ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
    model.append(l, k, v);
  }
}

/// |o - o*| / |o*|, the largest of the heads.
double error_of(const Answer& seen, const std::vector<double>& o, uint32_t d) {
  double worst = 0.0;
  for (size_t j = 0; j < seen.o.size(); j += d) {
    raise(worst, relative_error(&seen.o[j], &o[j], d));
  }
  return worst;
}

/// Keys of 0 have exact codes and weigh alike: lse counts the tokens. Without exact rows the output is the mean of
/// their values, which blocks hold exactly: a token that is there twice, or not at all, or another's in its place,
/// shows.
TEST(Codes, EveryTokenIsAttendedOnceAfterEveryOperation) {
  // Odd ones with their tails alone, those above 4 in lists.
  for (const uint64_t seed : unless_sanitized(std::vector<uint64_t>{1, 3, 4, 2, 5, 6}, 2)) {
    Numbers numbers(seed);
    auto ec = small_engine(1 + numbers.below(3));
    ec.kv_dtype = seed % 2 == 0 ? KEYHOLE_F16 : KEYHOLE_F32;
    const bool tail_alone = seed % 2 != 0;
    const char* blocks = tail_alone ? "codes:k=1,v=0" : "codes:k=1,v=4";
    const char* lists = tail_alone ? "codes:k=1,v=0,lists=16" : "codes:k=1,v=4,lists=40";
    auto sc = with_codes(seed > 4 ? lists : blocks, 1 + numbers.below(40));
    sc.append_block = 64 + numbers.below(400);
    sc.sink = numbers.below(9);
    if (tail_alone) sc.budget.attend = KEYHOLE_ATTEND_NONE;
    const EnginePtr engine = make_engine(ec);
    SessionPtr session = make_session(engine.get(), sc);
    ASSERT_NE(session, nullptr);
    Model model(ec);
    const Shape shape(ec);
    bool indexed = false;
    for (int i = 0; i < 30; ++i) {
      const uint32_t operation = i == 0 ? 0 : numbers.below(10);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", operation " + std::to_string(i) + ": " +
                   std::to_string(operation));
      if (operation < 2) {
        prefill(session.get(), model, shape, 2, 300 + numbers.below(600), numbers, 0.0F);
      } else if (operation < 6) {
        const uint32_t steps = 1 + numbers.below(60);
        for (uint32_t t = 0; t < steps; ++t) step(session.get(), model, shape, 2, numbers, 0.0F);
      } else if (operation == 6) {
        ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      } else if (operation == 7) {
        session = fork_of(session.get());
      } else {
        const uint32_t n = model.tokens(0) * 2 / 3 + numbers.below(model.tokens(0) / 3 + 1);
        ASSERT_OK(keyhole_session_truncate(session.get(), n));
        model.truncate(n);
      }
      for (uint32_t l = 0; l < 2 && model.tokens(l) != 0; ++l) {
        const auto q = numbers.many(shape.q(1));
        std::vector<double> lse;
        const auto o = model.attend_all(l, q, lse);
        const Answer seen = attend_only(session.get(), shape, l, q);
        for (size_t h = 0; h < lse.size(); ++h) ASSERT_NEAR(seen.lse[h], lse[h], 2e-5);
        for (size_t j = 0; j < o.size(); ++j)
          ASSERT_NEAR(seen.o[j], o[j], tail_alone ? 6e-4 : 0.05);
        indexed = indexed || layer_tokens(session.get(), l).indexed >= 256;
      }
      if (HasFatalFailure()) return;
    }
    EXPECT_TRUE(indexed);
  }
}

TEST(Codes, AsManyExactRowsAsThereAreIsExactAttention) {
  Numbers numbers(5);
  const auto ec = small_engine();
  const EnginePtr engine = make_engine(ec);
  for (const char* index : {"codes:k=1,v=1", "codes:k=1,v=1,lists=20,read=100"}) {
    const SessionPtr session = make_session(engine.get(), with_codes(index, 1024));
    Model model(ec);
    const Shape shape(ec);
    prefill(session.get(), model, shape, 2, 1000, numbers, 0.25F);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    EXPECT_EQ(layer_tokens(session.get(), 0).indexed, 980U);
    for (uint32_t l = 0; l < 2; ++l) expect_exact(session.get(), model, shape, l, numbers);
  }
}

TEST(Codes, ErrorsFallWithBitsAndRows) {
  KEYHOLE_SKIP_WITH_TSAN();
  Numbers numbers(6);
  auto ec = small_engine();
  ec.q_heads = 8;
  const EnginePtr engine = make_engine(ec);
  const Shape shape(ec);
  std::vector<double> errors;
  for (const char* index : {"codes:k=1,v=1", "codes:k=2,v=2", "codes:k=4,v=4"}) {
    for (const uint32_t rows : {1U, 64U}) {
      Numbers same(7);
      Model model(ec);
      const SessionPtr session = make_session(engine.get(), with_codes(index, rows));
      // Logits differ by half a nat: no row is read in doubt.
      prefill(session.get(), model, shape, 2, 3000, same, 0.1F);
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      double error = 0.0;
      for (int i = 0; i < 8; ++i) {
        const auto q = same.many(shape.q(1));
        std::vector<double> lse;
        const auto o = model.attend_all(0, q, lse);
        error = std::max(error, error_of(attend_only(session.get(), shape, 0, q), o, ec.head_dim));
      }
      errors.push_back(error);
    }
  }
  for (size_t i = 0; i < errors.size(); i += 2) EXPECT_LT(errors[i + 1], 1.02 * errors[i]) << i;
  for (size_t i = 2; i < errors.size(); ++i) EXPECT_LT(errors[i], errors[i - 2]) << i;
  EXPECT_LT(errors.back(), 0.2);
}

void expect_same_bits(const char* index) {
  constexpr uint32_t kPrompt = unless_sanitized(9000, 6000);
  TemporaryFolder folder;
  const auto path = (folder.path() / "session").string();
  std::vector<Answer> answers;
  for (const uint32_t threads : {1U, 3U}) {
    Numbers numbers(8);
    const auto ec = small_engine(threads);
    const EnginePtr engine = make_engine(ec);
    const Shape shape(ec);
    Model model(ec);
    const SessionPtr session = make_session(engine.get(), with_codes(index, 16));
    prefill(session.get(), model, shape, 2, kPrompt, numbers, 0.5F);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    for (int i = 0; i < 700; ++i) step(session.get(), model, shape, 2, numbers, 0.5F);
    EXPECT_GT(layer_tokens(session.get(), 0).indexed, kPrompt);
    const auto q = numbers.many(shape.q(1));
    answers.push_back(attend_only(session.get(), shape, 1, q));
    const SessionPtr copy = fork_of(session.get());
    answers.push_back(attend_only(copy.get(), shape, 1, q));
    ASSERT_OK(keyhole_session_save(session.get(), path.c_str()));
    const SessionPtr owned = load_of(engine.get(), path);
    answers.push_back(attend_only(owned.get(), shape, 1, q));
    std::vector<double> lse;
    const auto o = model.attend_all(1, q, lse);
    EXPECT_LT(error_of(answers.back(), o, ec.head_dim), 0.6);
  }
  for (const Answer& a : answers) {
    EXPECT_EQ(a.o, answers.front().o);
    EXPECT_EQ(a.lse, answers.front().lse);
  }
}

// Logits that differ by 40 nats: at 2 bits a code is off by 15. The statistics say that the codes could not tell.
TEST(Codes, SharpHeadsAreReadUntilTheirCodesCanTell) {
  KEYHOLE_SKIP_WITH_TSAN();
  const auto ec = small_engine(4);
  const EnginePtr engine = make_engine(ec);
  for (const char* index : {"codes:k=4,v=4", "codes:k=2,v=2", "codes:k=2,v=2,lists=32"}) {
    for (const float size : {0.1F, 40.0F}) {
      SCOPED_TRACE(index + std::string(" ") + std::to_string(size));
      Numbers numbers(31);
      auto sc = with_codes(index, 16);
      sc.audit_share = 1.0;
      const SessionPtr session = make_session(engine.get(), sc);
      Model model(ec);
      const Shape shape(ec);
      prefill(session.get(), model, shape, 2, 3000, numbers, size);
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      for (int i = 0; i < 6; ++i) {
        const auto q = numbers.many(shape.q(1));
        std::vector<double> lse;
        const auto o = model.attend_all(0, q, lse);
        const Answer seen = attend_only(session.get(), shape, 0, q);
        if (size < 1.0F) continue;
        EXPECT_LT(error_of(seen, o, shape.d), std::string(index) == "codes:k=4,v=4" ? 0.02 : 0.1);
        for (size_t h = 0; h < lse.size(); ++h) EXPECT_NEAR(seen.lse[h], lse[h], 0.1);
      }
      const auto s = statistics(session.get());
      EXPECT_LE(s.codes_given_up, s.codes_doubted);
      if (size < 1.0F) {
        EXPECT_EQ(s.codes_doubted, 0U);
        EXPECT_EQ(s.keys_opened, 0U);
      } else {
        EXPECT_LE(s.codes_doubted, 6U * ec.kv_heads);
        EXPECT_GT(s.keys_opened + s.codes_given_up, 0U);
      }
    }
  }
}

TEST(Codes, ThreadsForksAndFilesChangeNoBit) { expect_same_bits("codes"); }
TEST(Codes, ThreadsForksAndFilesChangeNoBitOfLists) { expect_same_bits("codes:lists=32"); }

TEST(Codes, AuditsSeeWhatWasReadAndWhatStandsForTheRest) {
  for (const int32_t action : {KEYHOLE_AUDIT_REPORT, KEYHOLE_AUDIT_WIDEN, KEYHOLE_AUDIT_EXACT}) {
    Numbers numbers(9);
    const auto ec = small_engine();
    const EnginePtr engine = make_engine(ec);
    const Shape shape(ec);
    Model model(ec);
    auto sc = with_codes("codes:k=2,v=2", 4);
    sc.audit_share = 1.0;
    sc.audit_action = action;
    sc.audit_bound = 1e-5F;
    const SessionPtr session = make_session(engine.get(), sc);
    prefill(session.get(), model, shape, 2, 2000, numbers, 0.5F);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    for (int i = 0; i < 40; ++i) step(session.get(), model, shape, 2, numbers, 0.5F);
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    ASSERT_OK(keyhole_session_get_audit(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
    EXPECT_GT(audit.audits, 0U);
    EXPECT_LT(audit.error_median, 0.5);
    EXPECT_GT(audit.missing_mean, 0.0);
    EXPECT_NEAR(audit.estimated_missing_mean, audit.missing_mean, 0.1 * audit.missing_mean + 1e-3);
  }
}

// The balance of codes is learned from the first prompt. Tokens a million times as large are beyond what its codes can
// hold: then they are read exactly, and the statistics say so.
TEST(Codes, TokensThatAreBeyondTheFirstOnesCodesAreReadExactly) {
  KEYHOLE_SKIP_WITH_TSAN();
  auto ec = small_engine(2);
  ec.kv_dtype = KEYHOLE_F32;
  ec.layers = 1;
  const EnginePtr engine = make_engine(ec);
  const Shape shape(ec);
  for (const char* index : {"codes:k=4,v=4", "codes:k=2,v=2", "codes:k=4,v=4,lists=32"}) {
    for (const auto& [key_size, value_size] :
         {std::pair{1e-8F, 1.0F}, std::pair{1.0F, 1e-8F}, std::pair{1e-38F, 1e-39F}}) {
      SCOPED_TRACE(index + std::string(", keys ") + std::to_string(key_size));
      Numbers numbers(12);
      Model model(ec);
      const SessionPtr session = make_session(engine.get(), with_codes(index, 16));
      for (const bool first : {true, false}) {
        constexpr uint32_t kTokens = 1200;
        auto k = numbers.many(shape.kv(kTokens)), v = numbers.many(shape.kv(kTokens));
        for (float& x : k) x *= first ? key_size : 0.2F;
        for (float& x : v) x *= first ? value_size : 1.0F;
        const auto tk = tensor(k, {kTokens, shape.hkv, shape.d}),
                   tv = tensor(v, {kTokens, shape.hkv, shape.d});
        ASSERT_OK(keyhole_session_append(session.get(), 0, &tk, &tv, nullptr));
        ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
        model.append(0, k, v);
        const auto q = numbers.many(shape.q(1));
        std::vector<double> lse;
        const auto o = model.attend_all(0, q, lse);
        const Answer seen = attend_only(session.get(), shape, 0, q);
        for (const float x : seen.o) ASSERT_TRUE(std::isfinite(x));
        if (first) continue;
        EXPECT_LT(error_of(seen, o, ec.head_dim), 0.02);
        for (size_t h = 0; h < lse.size(); ++h) EXPECT_NEAR(seen.lse[h], lse[h], 0.02);
        EXPECT_GT(statistics(session.get()).codes_doubted, 0U);
      }
    }
  }
}

// Queries that are finite, but whose logits by code are not: all tokens are read. Other index types answer with
// numbers, too.
TEST(Codes, QueriesOfAnySizeAreAnswered) {
  KEYHOLE_SKIP_WITH_TSAN();
  auto ec = small_engine(2);
  ec.layers = 1;
  const EnginePtr engine = make_engine(ec);
  const Shape shape(ec);
  for (const char* index : {"codes:k=4,v=4", "codes:k=2,v=2,lists=32", "ivf", "hnsw", "sparq"}) {
    const bool has_codes = std::string(index).starts_with("codes");
    Numbers numbers(13);
    Model model(ec);
    keyhole_session_config config = with_codes(index, 16);
    if (!has_codes) config.budget.tail = KEYHOLE_TAIL_NONE;
    const SessionPtr session = make_session(engine.get(), config);
    prefill(session.get(), model, shape, 1, 900, numbers, 1.0F);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    for (const float size : {1e-45F, 1e-38F, 1e15F, 1e30F, 1e36F, 3e38F}) {
      SCOPED_TRACE(index + std::string(", ") + std::to_string(size));
      auto q = numbers.many(shape.q(1));
      float largest = 0.0F;
      for (const float x : q) largest = std::max(largest, std::abs(x));
      for (float& x : q) x = x / largest * size;
      const uint64_t before = statistics(session.get()).codes_given_up;
      const Answer seen = attend_only(session.get(), shape, 0, q);
      for (const float x : seen.o) ASSERT_TRUE(std::isfinite(x));
      for (const float x : seen.lse) ASSERT_TRUE(std::isfinite(x));
      if (!has_codes) continue;
      if (size > 1e15F) {
        EXPECT_GT(statistics(session.get()).codes_given_up, before);
      }
      if (size < 1.0F) continue;
      std::vector<double> lse;
      const auto o = model.attend_all(0, q, lse);
      // Parts of the tokens whose log-sum-exps are both beyond fp32 cannot be told apart.
      if (std::any_of(lse.begin(), lse.end(), [](double x) { return std::abs(x) > 3.4e38; }))
        continue;
      EXPECT_LT(error_of(seen, o, ec.head_dim), 0.02);
      for (size_t h = 0; h < lse.size(); ++h) {
        EXPECT_NEAR(seen.lse[h], lse[h], 1e-4 * std::abs(lse[h]));
      }
    }
  }
}

// ---- Settings ------------------------------------------------------------------------------------

keyhole_budget budget_of(keyhole_session* s) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  EXPECT_OK(keyhole_session_get_budget(s, KEYHOLE_ALL, KEYHOLE_ALL, &b));
  return b;
}

TEST(Codes, ABudgetThatNobodySetIsTheIndexTypes) {
  const EnginePtr engine = make_engine(small_engine());
  auto sc = small_session();
  keyhole_budget_init(&sc.budget);
  sc.index = "codes:k=4,v=4";
  const SessionPtr session = make_session(engine.get(), sc);
  EXPECT_EQ(budget_of(session.get()).tail, KEYHOLE_TAIL_CODES);
  EXPECT_EQ(budget_of(session.get()).top_k, 16U);
  ASSERT_OK(keyhole_session_set_index(session.get(), "flat"));
  EXPECT_EQ(budget_of(session.get()).tail, KEYHOLE_TAIL_NONE);
  EXPECT_EQ(budget_of(session.get()).top_k, 100U);
  ASSERT_OK(keyhole_session_set_index(session.get(), "codes"));
  EXPECT_EQ(budget_of(session.get()).tail, KEYHOLE_TAIL_CODES);

  sc.budget.top_k = 101;
  const SessionPtr searched = make_session(engine.get(), sc);
  EXPECT_EQ(budget_of(searched.get()).tail, KEYHOLE_TAIL_NONE);
}

TEST(Codes, WhatCannotBeIsRefused) {
  const EnginePtr engine = make_engine(small_engine());
  const auto refuses = [&](keyhole_session_config c) {
    keyhole_session* s = nullptr;
    EXPECT_EQ(keyhole_session_create(engine.get(), &c, &s), KEYHOLE_INVALID_ARGUMENT);
    return std::string(keyhole_last_error());
  };
  EXPECT_NE(refuses(with_codes("flat", 16)).find("type codes"), std::string::npos);
  auto c = with_codes("codes", 16);
  c.budget.error_target = 0.1F;
  EXPECT_NE(refuses(c).find("target"), std::string::npos);
  c = with_codes("codes", 2000);
  EXPECT_NE(refuses(c).find("1..1024"), std::string::npos);
  c = with_codes("codes", 16);
  c.budget.attend = KEYHOLE_ATTEND_SCORED;
  EXPECT_NE(refuses(c).find("attend"), std::string::npos);

  const SessionPtr session = make_session(engine.get(), with_codes("codes", 12));
  auto b = budget_of(session.get());
  EXPECT_EQ(b.top_k, 12U);
  ASSERT_OK(keyhole_session_set_index(session.get(), "flat"));
  EXPECT_EQ(budget_of(session.get()).tail, KEYHOLE_TAIL_NONE);
  EXPECT_EQ(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, 0, &b),
            KEYHOLE_INVALID_ARGUMENT);
}

/// A search for the best keys without the tail works as with any other type.
TEST(Codes, WithoutATailItIsAnIndexLikeOthers) {
  Numbers numbers(10);
  const auto ec = small_engine();
  const EnginePtr engine = make_engine(ec);
  auto sc = with_codes("codes:k=4,v=0", 2500);
  sc.budget.tail = KEYHOLE_TAIL_NONE;
  const SessionPtr session = make_session(engine.get(), sc);
  Model model(ec);
  const Shape shape(ec);
  prefill(session.get(), model, shape, 2, 2000, numbers, 0.25F);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (uint32_t l = 0; l < 2; ++l) expect_exact(session.get(), model, shape, l, numbers);
}

}  // namespace
}  // namespace keyhole::test
