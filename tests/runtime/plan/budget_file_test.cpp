// Sessions whose heads have their index and budget from a file.
#include <fstream>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class BudgetFile : public ::testing::Test {
 protected:
  void write(const std::string& heads, const std::string& more = "") {
    std::ofstream(path_) << R"({"keyhole_budgets": 1, "model": {"layers": 2, "q_heads": 4,
                               "kv_heads": 2, "head_dim": 64}, )" +
                                more + R"("heads": [)" + heads + "]}";
  }
  /// The status of a session made with the file.
  keyhole_status open(keyhole_session_config c = small_session()) {
    c.budgets = path_.c_str();
    keyhole_session* s = nullptr;
    const keyhole_status status = keyhole_session_create(engine_.get(), &c, &s);
    EXPECT_EQ(status == KEYHOLE_OK, s != nullptr);
    session_.reset(s);
    return status;
  }
  void fill(uint32_t n) {
    for (uint32_t l = 0; l < 2; ++l) prefill_both(session_.get(), model_, shape_, l, n, numbers_);
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  }
  [[nodiscard]] keyhole_budget get(uint32_t layer, uint32_t kv_head) const {
    keyhole_budget b;
    keyhole_budget_init(&b);
    EXPECT_OK(keyhole_session_get_budget(session_.get(), layer, kv_head, &b));
    return b;
  }

  TemporaryFolder folder_;
  std::string path_ = (folder_ / "budgets.json").string();
  keyhole_engine_config ec_ = small_engine();
  EnginePtr engine_ = make_engine(ec_);
  SessionPtr session_;
  Numbers numbers_{41};
  Model model_{ec_};
  Shape shape_{ec_};
};

TEST_F(BudgetFile, MayLeaveOutSlidingLayersAtTheEnd) {
  write(R"({"layer": 1, "kv_head": "all", "top_k": 20})");
  std::vector<keyhole_layer_config> layers(4);
  for (keyhole_layer_config& l : layers) keyhole_layer_config_init(&l, &ec_);
  ec_.layers = ec_.layer_count = 4;
  ec_.layer_configs = layers.data();
  layers[2].window = layers[3].window = 10;
  engine_ = make_engine(ec_);
  ASSERT_EQ(open(), KEYHOLE_OK) << keyhole_last_error();
  EXPECT_EQ(get(1, 1).top_k, 20U);
  layers[2].window = 0;
  engine_ = make_engine(ec_);
  EXPECT_EQ(open(), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("layers 2, the engine has 4");
}

/// Beside codes a budget of which nothing is said is theirs; one that is named stays, whatever its values.
TEST_F(BudgetFile, NoTailBesideCodesIsMeantWhereItIsNamed) {
  write(R"({"layer": "all", "kv_head": "all", "index": "codes"},
           {"layer": 0, "kv_head": 0, "tail": "none", "top_k": 99},
           {"layer": 0, "kv_head": 1, "tail": "none", "top_k": 100})");
  auto c = small_session();
  keyhole_budget_init(&c.budget);
  ASSERT_EQ(open(c), KEYHOLE_OK) << keyhole_last_error();
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_EQ(get(0, h).tail, KEYHOLE_TAIL_NONE) << h;
    EXPECT_EQ(get(0, h).top_k, 99U + h);
    EXPECT_EQ(get(1, h).tail, KEYHOLE_TAIL_CODES) << h;
    EXPECT_EQ(get(1, h).top_k, 16U);
  }
}

/// Heads with an index of their own that has no codes do not have the session's tail of codes; one that is named is
/// refused, by the file's name.
TEST_F(BudgetFile, TheTailOfCodesGoesWithTheIndexThatBringsIt) {
  write(R"({"layer": "all", "kv_head": "all", "index": "ivf:probe=4"},
           {"layer": 1, "kv_head": "all", "top_k": 20},
           {"layer": 1, "kv_head": 1, "index": "codes"})");
  auto c = small_session();
  c.index = "codes";
  c.budget.tail = KEYHOLE_TAIL_CODES;
  c.budget.top_k = 16;
  ASSERT_EQ(open(c), KEYHOLE_OK) << keyhole_last_error();
  EXPECT_EQ(get(0, 0).tail, KEYHOLE_TAIL_NONE);
  EXPECT_EQ(get(0, 0).top_k, 100U);
  EXPECT_EQ(get(1, 0).tail, KEYHOLE_TAIL_NONE);
  EXPECT_EQ(get(1, 0).top_k, 20U);
  EXPECT_EQ(get(1, 1).tail, KEYHOLE_TAIL_CODES);
  write(R"({"layer": 0, "kv_head": 0, "index": "ivf:probe=4", "tail": "codes"})");
  EXPECT_EQ(open(c), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text(path_ + ": tail is KEYHOLE_TAIL_CODES with index 'ivf:probe=4'");
}

TEST_F(BudgetFile, LaterEntriesWinFieldByField) {
  write(R"({"layer": "all", "kv_head": "all", "top_k": 10, "min_weight": 0.01},
           {"layer": 1, "kv_head": "all", "attend": "weight", "top_k": 20},
           {"layer": "all", "kv_head": 0, "top_k": 30, "tail": "second"},
           {"layer": 1, "kv_head": 1, "error_target": 0.05, "max_keys": 77})",
        R"("tail_partition": 32,)");
  auto c = small_session();
  c.budget.attend = KEYHOLE_ATTEND_SCORED;
  ASSERT_EQ(open(c), KEYHOLE_OK) << keyhole_last_error();
  EXPECT_EQ(get(0, 0).top_k, 30U);
  EXPECT_EQ(get(0, 1).top_k, 10U);
  EXPECT_EQ(get(1, 0).top_k, 30U);
  EXPECT_EQ(get(1, 1).top_k, 20U);
  EXPECT_EQ(get(0, 0).attend, KEYHOLE_ATTEND_SCORED);  // the session's
  EXPECT_EQ(get(1, 1).attend, KEYHOLE_ATTEND_WEIGHT);
  EXPECT_EQ(get(1, 1).min_weight, 0.01F);
  EXPECT_EQ(get(0, 0).tail, KEYHOLE_TAIL_SECOND);
  EXPECT_EQ(get(0, 1).tail, KEYHOLE_TAIL_NONE);
  EXPECT_EQ(get(1, 1).error_target, 0.05F);
  EXPECT_EQ(get(1, 1).max_keys, 77U);
  keyhole_session_config seen;
  keyhole_session_config_init(&seen);
  ASSERT_OK(keyhole_session_get_config(session_.get(), &seen));
  EXPECT_EQ(seen.budget.top_k, 4096U);
  EXPECT_EQ(seen.tail_partition, 32U);
  EXPECT_STREQ(seen.budgets, path_.c_str());
}

// Each head against a session that has its index and budget everywhere.
TEST_F(BudgetFile, HeadsHaveTheirOwnIndex) {
  const char* specs[2][2] = {{"ivf:C=16,probe=2", "hnsw:M=8,ef=20"},
                             {"flat:codec=int8", "ivf:C=8,probe=3,codec=int8"}};
  std::string heads;
  for (uint32_t i = 0; i < 4; ++i) {
    heads += (i == 0 ? "" : ",") + std::string(R"({"layer": )") + std::to_string(i / 2) +
             R"(, "kv_head": )" + std::to_string(i % 2) + R"(, "index": ")" + specs[i / 2][i % 2] +
             R"(", "top_k": )" + std::to_string(5 + 4 * i) + "}";
  }
  write(heads);
  ASSERT_EQ(open(), KEYHOLE_OK) << keyhole_last_error();
  std::filesystem::remove(path_);  // all of it has been read
  fill(700);
  const SessionPtr mixed = std::move(session_);
  const std::string saved = (folder_ / "saved").string();
  ASSERT_OK(keyhole_session_save(mixed.get(), saved.c_str()));
  const SessionPtr loaded_guard = load_of(engine_.get(), saved);
  const SessionPtr forked_guard = fork_of(mixed.get());
  for (uint32_t i = 0; i < 4; ++i) {
    auto c = small_session();
    c.index = specs[i / 2][i % 2];
    c.budget.top_k = 5 + 4 * i;
    session_ = make_session(engine_.get(), c);
    numbers_ = Numbers(41);
    model_ = Model(ec_);
    fill(700);
    Numbers numbers(99);
    const auto q = numbers.many(shape_.q(1));
    const Answer expected = attend_only(session_.get(), shape_, i / 2, q);
    for (keyhole_session* s : {mixed.get(), loaded_guard.get(), forked_guard.get()}) {
      const Answer seen = attend_only(s, shape_, i / 2, q);
      for (uint32_t h = 2 * (i % 2); h < 2 * (i % 2) + 2; ++h) {
        EXPECT_EQ(seen.lse[h], expected.lse[h]);
        for (uint32_t j = 0; j < 64; ++j) ASSERT_EQ(seen.o[h * 64 + j], expected.o[h * 64 + j]);
      }
    }
  }
}

TEST_F(BudgetFile, DenseHeadsAreExactAndHaveNoIndex) {
  write(
      R"({"layer": 0, "kv_head": 1, "dense": true}, {"layer": 1, "kv_head": "all", "dense": true})");
  auto c = small_session();
  c.budget.top_k = 1;
  ASSERT_EQ(open(c), KEYHOLE_OK) << keyhole_last_error();
  fill(500);
  const auto q = numbers_.many(shape_.q(1));
  for (uint32_t l = 0; l < 2; ++l) {
    std::vector<double> lse;
    const auto o = model_.attend_all(l, q, lse);
    const Answer seen = attend_only(session_.get(), shape_, l, q);
    for (uint32_t h = l == 0 ? 2 : 0; h < 4; ++h) {
      EXPECT_NEAR(seen.lse[h], lse[h], 1e-4);
      for (uint32_t j = 0; j < 64; ++j) ASSERT_NEAR(seen.o[h * 64 + j], o[h * 64 + j], 1e-4);
    }
    // The head that is not dense attends one key of many.
    if (l == 0) {
      EXPECT_GT(std::fabs(seen.lse[0] - lse[0]), 1e-3);
    }
  }
  EXPECT_GT(layer_tokens(session_.get(), 0).indexed, 0U);
  EXPECT_EQ(layer_tokens(session_.get(), 0).pending, 0U);
  EXPECT_EQ(layer_tokens(session_.get(), 1).indexed, 0U);
  // An index for all is one for these heads too.
  ASSERT_OK(keyhole_session_set_index(session_.get(), "flat"));
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(layer_tokens(session_.get(), 1).pending, 0U);
}

TEST_F(BudgetFile, DecodingGoesOnWithMixedHeads) {
  write(
      R"({"layer": 0, "kv_head": 1, "dense": true}, {"layer": 1, "kv_head": 0, "index": "ivf:C=4,probe=4"},
           {"layer": 1, "kv_head": 1, "index": "hnsw:M=8,ef=400"})");
  ASSERT_EQ(open(), KEYHOLE_OK) << keyhole_last_error();
  fill(300);
  for (int i = 0; i < 200; ++i) {  // several blocks are taken in
    for (uint32_t l = 0; l < 2; ++l) {
      const auto k = numbers_.many(shape_.kv(1));
      const auto v = numbers_.many(shape_.kv(1));
      const auto q = numbers_.many(shape_.q(1));
      std::vector<float> o(shape_.q(1));
      const auto tk = tensor(k, {2, 64});
      const auto tv = tensor(v, {2, 64});
      const auto tq = tensor(q, {4, 64});
      const auto out = tensor(o, {4, 64});
      ASSERT_OK(keyhole_session_attend(session_.get(), l, &tq, &tk, &tv, &out, nullptr));
      model_.append(l, k, v);
    }
  }
  EXPECT_GT(layer_tokens(session_.get(), 0).indexed, 400U);
  for (uint32_t l = 0; l < 2; ++l) expect_exact(session_.get(), model_, shape_, l, numbers_);
}

TEST_F(BudgetFile, WhatIsRefusedSaysWhyAndWhere) {
  const auto refused = [&](keyhole_status status, const std::string& part) {
    EXPECT_EQ(open(), status);
    const std::string text = keyhole_last_error();
    EXPECT_EQ(text.find(path_), 0U) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  refused(KEYHOLE_IO, "");
  write(R"({"layer": 0, "kv_head": 0, "index": "ivf:probes=3"})");
  refused(KEYHOLE_INVALID_ARGUMENT, "heads[0]: index spec");
  write(R"({"layer": 0, "kv_head": 0}, {"layer": 0, "kv_head": 1, "error_target": 1.5})");
  refused(KEYHOLE_INVALID_ARGUMENT, "heads[1]: error_target is 1.5");
  write(R"({"layer": 0, "kv_head": 0, "min_keys": 9, "max_keys": 3})");
  refused(KEYHOLE_INVALID_ARGUMENT, "heads[0]: min_keys is 9");
  write(R"({"layer": 0, "kv_head": 0, "tail": "third"})");
  refused(KEYHOLE_CORRUPT, "heads[0].tail");
  write("");
  std::ofstream(path_, std::ios::app) << "x";
  refused(KEYHOLE_CORRUPT, "not valid JSON");
  std::ofstream(path_) << R"({"keyhole_budgets": 9})";
  refused(KEYHOLE_VERSION_MISMATCH, "format 9");
  write("");
  for (const auto& change : {+[](keyhole_engine_config& c) { c.layers = 3; },
                             +[](keyhole_engine_config& c) { c.q_heads = 8; },
                             +[](keyhole_engine_config& c) { c.kv_heads = 4; },
                             +[](keyhole_engine_config& c) { c.head_dim = 128; }}) {
    keyhole_engine_config other = ec_;
    change(other);
    engine_ = make_engine(other);
    refused(KEYHOLE_INVALID_ARGUMENT, "it is of a model with");
  }
}

TEST_F(BudgetFile, ThePlanCountsEveryHeadsIndex) {
  keyhole_session_config c = small_session();
  c.budget.top_k = 10;
  constexpr uint32_t kTokens = unless_sanitized(5000, 1000);
  const auto index_bytes = [&](const char* spec, const char* budgets) {
    c.index = spec;
    c.budgets = budgets;
    keyhole_memory_plan plan;
    keyhole_memory_plan_init(&plan);
    EXPECT_OK(keyhole_plan(&ec_, &c, kTokens, 0, 0, &plan));
    return plan.index_bytes;
  };
  const uint64_t ivf = index_bytes("ivf:C=64", nullptr);
  const uint64_t hnsw = index_bytes("hnsw:M=16", nullptr);
  ASSERT_NE(ivf, hnsw);
  write(
      R"({"layer": 0, "kv_head": 1, "dense": true}, {"layer": 1, "kv_head": 0, "index": "ivf:C=64"})");
  // Of four heads one has none, one is of ivf.
  EXPECT_EQ(index_bytes("hnsw:M=16", path_.c_str()), 2 * hnsw / 4 + ivf / 4);
  c.max_tokens = 8192;
  ASSERT_EQ(open(c), KEYHOLE_OK) << keyhole_last_error();
  fill(kTokens);
  const auto st = statistics(session_.get());
  EXPECT_NEAR(static_cast<double>(st.index_bytes),
              static_cast<double>(index_bytes("hnsw:M=16", path_.c_str())),
              0.15 * static_cast<double>(st.index_bytes));
}

}  // namespace
}  // namespace keyhole::test
